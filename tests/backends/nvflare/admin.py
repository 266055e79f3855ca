"""Administrator commands in a separate process, because NVFLARE warns. Prints the answer.

``python -m tests.backends.nvflare.admin KIT SITES submit JOB`` waits for the number of sites and prints the job's
name; ``... KIT SITES status NAME`` prints the status.
"""

import os
import sys
import time

from nvflare.fuel.flare_api.flare_api import new_secure_session


def main(kit, sites, command, job):
    while True:
        try:
            session = new_secure_session("admin@nvidia.com", kit, timeout=10)
            if len(session.get_system_info().client_info) >= int(sites):
                return session.submit_job(job) if command == "submit" else session.get_job_meta(job)["status"]
            session.close()
        except Exception as error:
            sys.stderr.write(f"{error}\n")
        time.sleep(0.5)


sys.stdout.write(f"\nanswer {main(*sys.argv[1:])}\n")
sys.stdout.flush()
os._exit(0)  # NVFLARE's threads would continue
