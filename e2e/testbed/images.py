"""Images without a registry: OCI archives from files, brought into containerd."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed.bed import Bed, BedError
from testbed.programs import Catalogue

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class FileImage:
    """An image of single static programs."""

    reference: str
    entrypoint: str
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path in the image -> file of the machine, made executable."""

    def write(self, target: Path) -> None:
        """The OCI archive."""
        layer = self.layer()
        system = {"architecture": ARCHITECTURES.get(platform.machine(), platform.machine()), "os": "linux"}
        config = encoded(
            system
            | {
                "config": {"Entrypoint": [self.entrypoint], "User": "65532:65532"},
                "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
            }
        )
        kind = "application/vnd.oci.image"
        manifest = encoded(
            {
                "schemaVersion": 2,
                "mediaType": f"{kind}.manifest.v1+json",
                "config": described(config, f"{kind}.config.v1+json"),
                "layers": [described(layer, f"{kind}.layer.v1.tar")],
            }
        )
        names = {
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": self.reference.rpartition(":")[2],
        }
        index = described(manifest, f"{kind}.manifest.v1+json") | {"annotations": names}
        with tarfile.open(target, "w") as archive:
            put(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            put(archive, "index.json", encoded({"schemaVersion": 2, "manifests": [index]}))
            for blob in (layer, config, manifest):
                put(archive, f"blobs/{digest(blob).replace(':', '/')}", blob)

    def layer(self) -> bytes:
        """The files as one layer, the same bytes for the same files."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, source in sorted(self.files.items()):
                put(archive, path.lstrip("/"), source.read_bytes(), 0o755)
        return buffer.getvalue()


def pause_image(catalogue: Catalogue) -> FileImage:
    """What holds a pod's namespaces."""
    return FileImage("kvist.dev/pause:1", "/pause", {"/pause": catalogue.path("pause")})


def coredns_image(catalogue: Catalogue) -> FileImage:
    """The cluster's DNS."""
    return FileImage("kvist.dev/coredns:1", "/coredns", {"/coredns": catalogue.path("coredns")})


@dataclass(frozen=True)
class ImageStore:
    """containerd's images of one bed, in the namespace that kubelet uses."""

    bed: Bed
    catalogue: Catalogue

    def bring(self, image: FileImage) -> None:
        """Import it unless an image of this name is there."""
        if image.reference in self.references():
            return
        archive = self.bed.state / "image.tar"
        image.write(archive)
        self.load(archive)
        archive.unlink()

    def load(self, archive: Path) -> None:
        """Import an OCI archive."""
        self.ctr("images", "import", str(archive))

    def references(self) -> set[str]:
        """The names of the images that are there."""
        return set(self.ctr("images", "list", "--quiet").split())

    def ctr(self, *arguments: str) -> str:
        """The ctr command. BedError with its message."""
        program = str(self.catalogue.path("ctr"))
        command = [program, f"--address={self.bed.containerd}", "--namespace=k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise BedError(f"ctr {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


def encoded(value: object) -> bytes:
    """JSON, the same bytes for the same value."""
    return json.dumps(value, sort_keys=True).encode()


def digest(blob: bytes) -> str:
    """As OCI writes it."""
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def described(blob: bytes, media_type: str) -> dict[str, object]:
    """An OCI descriptor."""
    return {"mediaType": media_type, "digest": digest(blob), "size": len(blob)}


def put(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """One file."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
