"""A real S3 API for tests: moto's server on this machine, behind a proxy that cuts connections in the middle."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading

import boto3
import s3fs
from moto.server import ThreadedMotoServer


class Server:
    """An S3 server with one bucket. `environment` makes s3fs use it."""

    bucket = "runs"

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self.proxy = Proxy(host, port)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "4",
        }  # fmt: skip
        client = boto3.client(
            "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", aws_access_key_id="key",
            aws_secret_access_key="secret",
        )  # fmt: skip
        client.create_bucket(Bucket=self.bucket)

    def close(self) -> None:
        s3fs.S3FileSystem.clear_instance_cache()
        self.proxy.close()
        self._moto.stop()


class Proxy:
    """Passes bytes between clients and a server, until it is told to cut connections."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self.cuts_left = 0
        self._after = 0
        self._uploads = False
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, connections: int, after: int, uploads: bool) -> None:
        """Cut the next connections after so many bytes of requests (`uploads`) or of answers."""
        with self._lock:
            self.cuts_left, self._after, self._uploads = connections, after, uploads

    def restore(self) -> None:
        """Cut no more."""
        self.cut(0, 0, False)

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            passed = {client: 0, server: 0}
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data, sink = source.recv(65536), server if source is client else client
                    most = self._limit(source is client, passed[source], len(data))
                    sink.sendall(data[:most])
                    passed[source] += len(data)
                    if not data or most is not None:
                        return

    def _limit(self, uploads: bool, passed: int, size: int) -> int | None:
        """How many of these bytes still pass before the connection is cut; None: all, and no cut."""
        with self._lock:
            if not self.cuts_left or uploads != self._uploads or passed + size <= self._after:
                return None
            self.cuts_left -= 1
            return max(0, self._after - passed)
