"""The link between the machine and the bed, and the routes to its Services and pods."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from testbed.bed import Bed, BedError
from testbed.namespaces import Process, entering

SYSCTLS = {
    "net.ipv4.ip_forward": "1",
    # Services between pods of one bridge need their replies to pass the packet filter.
    "net.bridge.bridge-nf-call-iptables": "1",
}


def connect(bed: Bed, first: Process) -> None:
    """One veth pair: the API server, Services and pods can be reached from the machine; nothing beyond it."""
    refuse_taken(bed)
    ip("link", "add", bed.link, "type", "veth", "peer", "name", "uplink", "netns", str(first.pid))
    ip("address", "add", f"{bed.machine}/{bed.prefix}", "dev", bed.link)
    ip("link", "set", bed.link, "up")
    for command in (
        ("address", "add", f"{bed.address}/{bed.prefix}", "dev", "uplink"),
        ("link", "set", "lo", "up"),
        ("link", "set", "uplink", "up"),
        ("route", "add", "default", "via", bed.machine),
    ):
        check(entering(first, "ip", *command))
    for network in (bed.services, bed.pods):
        ip("route", "add", network, "via", bed.address, "dev", bed.link)
    for name, value in SYSCTLS.items():
        path = f"/proc/sys/{name.replace('.', '/')}"
        if Path(path).exists():
            check(entering(first, "sh", "-c", f"echo {value} >{path}"))


def disconnect(bed: Bed) -> None:
    """Remove the machine's end; addresses and routes go with it."""
    if Path(f"/sys/class/net/{bed.link}").exists():
        # The pair also goes when the namespace goes, which the kernel does in its own time.
        subprocess.run(["ip", "link", "delete", bed.link], capture_output=True, check=False)


def refuse_taken(bed: Bed) -> None:
    """BedError when the machine already has a route of its own into one of the bed's networks."""
    for address in (bed.address, bed.api_service, bed.pods.partition("/")[0]):
        asked = subprocess.run(["ip", "-json", "route", "get", address], capture_output=True, check=False)
        route = json.loads(asked.stdout)[0] if asked.returncode == 0 else {"gateway": "none at all"}
        if "gateway" not in route:
            raise BedError(
                f"address {address} is already reached over this machine's link {route.get('dev')}; "
                f"end what uses it, or change the addresses in e2e/testbed/bed.py"
            )


def ip(*arguments: str) -> None:
    """The ip command on the machine."""
    check(["ip", *arguments])


def check(command: list[str]) -> None:
    """Run it; BedError with its message."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip()}")
