"""A loopback proxy for TCP connections that can be cut after a number of bytes in one direction."""

import contextlib
import socket
import struct
import threading


class Link:
    """Forwards connections to a port. A cut resets all connections, and refuses new connections until the link is
    mended.

    Args:
        address: ``host:port`` behind the link.

    Attributes:
        address: ``host:port`` of the proxy.
        passed: Number of bytes ``"down"``, to the connecting side, and ``"up"``.
        cuts: Number of cuts.
    """

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed, self.cuts = {"down": 0, "up": 0}, 0
        self._open, self._lock, self._is_cut, self._plan = set(), threading.RLock(), False, None
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, way, count, seconds):
        """Cuts the link for some seconds after ``count`` more bytes in one direction."""
        with self._lock:
            self._plan = way, self.passed[way] + count, seconds

    def cut(self, seconds):
        with self._lock:
            self._is_cut, self._plan, ends, self._open = True, None, self._open, set()
            self.cuts += 1
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # sends a reset
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        timer = threading.Timer(seconds, self.mend)
        timer.daemon = True
        timer.start()

    def mend(self):
        with self._lock:
            self._is_cut = False

    def close(self):
        self.cut(0)
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._is_cut:
                    raise OSError
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for ends, way in (((server, client), "down"), ((client, server), "up")):
                threading.Thread(target=self._pass, args=(*ends, way), daemon=True).start()

    def _pass(self, source, target, way):
        with contextlib.suppress(OSError):
            while data := source.recv(2**14):
                with self._lock:
                    self.passed[way] += len(data)
                    if self._plan is not None and self._plan[0] == way and self.passed[way] >= self._plan[1]:
                        self.cut(self._plan[2])
                        return
                target.sendall(data)
        with self._lock:
            self._open -= {source, target}
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
