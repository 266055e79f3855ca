"""The site's part: a policy that decides what leaves a client's machine, and a record of what has left."""
