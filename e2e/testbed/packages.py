"""Programs that come as Debian packages."""

from __future__ import annotations

import os
import shutil
import subprocess

from testbed.bed import BedError

# A file or command that shows the package is there -> the package.
API = {"ip": "iproute2", "openssl": "openssl", "unshare": "util-linux"}
NODE = {
    **API,
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "ipset": "ipset",
    "nft": "nftables",
    "conntrack": "conntrack",
    "mount": "mount",
}
IMAGES = {"mmdebstrap": "mmdebstrap", "buildah": "buildah"}
GROUPS = {"api": API, "node": NODE, "images": IMAGES}


def need_packages(group: str) -> None:
    """Install what is missing with apt-get. BedError naming the packages where that cannot be done."""
    missing = sorted(package for sign, package in GROUPS[group].items() if not there(sign))
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise BedError(f"install these first: {', '.join(missing)} (no apt-get here to do it)")
    print(f"cluster: installing {' '.join(missing)}", flush=True)
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run([*apt, *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BedError(f"apt-get {command[0]}: {done.stderr.strip()}")


def there(sign: str) -> bool:
    """Whether a command is found, or a file exists."""
    return os.path.exists(sign) if sign.startswith("/") else shutil.which(sign) is not None
