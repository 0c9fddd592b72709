"""A registry with the image ``train:1``: ``python registry.py FOLDER PORT`` serves FOLDER as its only layer.

It answers the part of the OCI distribution API that a pull needs.
"""

import gzip
import hashlib
import http.server
import io
import json
import sys
import tarfile

OCI = "application/vnd.oci.image"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def entry(data: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": f"{OCI}.{kind}", "size": len(data), "digest": digest(data)}


def contents(folder: str) -> tuple[bytes, list[bytes]]:
    """Return the manifest of an image with the files of ``folder`` and a variable KEY, and its blobs."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    layer = gzip.compress(packed.getvalue(), 1)
    facts = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["KEY=of the image", "PATH=/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(packed.getvalue())]},
    }
    config = json.dumps(facts).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": entry(config, "config.v1+json"),
        "layers": [entry(layer, "layer.v1.tar+gzip")],
    }
    return json.dumps(manifest).encode(), [config, layer]


def main() -> None:
    """Serve until the process is killed."""
    manifest, blobs = contents(sys.argv[1])
    known = {digest(data): data for data in (manifest, *blobs)} | {"1": manifest, "": b"{}"}

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = known.get(self.path.rpartition("/")[2])
            self.send_response(404 if data is None else 200)
            kind = f"{OCI}.manifest.v1+json" if data is manifest else "application/octet-stream"
            for key, value in {
                "Content-Type": kind,
                "Content-Length": str(len(data or b"")),
                "Docker-Content-Digest": digest(data or b""),
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Registry).serve_forever()


if __name__ == "__main__":
    main()
