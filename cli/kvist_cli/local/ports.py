"""Ports are checked before anything starts, so that a taken one is named and not a riddle in a log."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

import psutil

from kvist_connector.errors import ConfigError
from kvist_operator.render.local import LOOPBACK, Process

_FLAGS = "--port-{}"


def check_ports(processes: Iterable[Process], host: str) -> None:
    """Raise ConfigError naming the first port that is out of range, used twice, or taken, and by whom."""
    _check_host(host)
    owners: dict[int, str] = {}
    for process in processes:
        for name, port in process.ports.items():
            flag = _FLAGS.format(name)
            if port > 65535:
                raise ConfigError(
                    f"{flag}: {process.name} would need port {port}, above 65535; give a lower one"
                )
            if port in owners:
                raise ConfigError(
                    f"{flag}: port {port} of {process.name} is also that of {owners[port]}; give another"
                )
            owners[port] = process.name
            _check_free(
                LOOPBACK if process.replica or name == "router-admin" else host, port, process.name, flag
            )


def _check_host(host: str) -> None:
    """Whether a program of this machine can listen there at all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except (OSError, UnicodeError, TypeError) as error:  # TypeError: not encodable as a name
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigError(
                f"--host: {host!r} is no address of this machine ({reason}); 127.0.0.1 is for this machine "
                "only, 0.0.0.0 for every network"
            ) from error


def _check_free(host: str, port: int, program: str, flag: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT are no hindrance, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"{flag}: {program} may not listen on port {port} of {host} ({error.strerror}); "
                    f"give another port with {flag}"
                ) from error
            raise ConfigError(
                f"{flag}: port {port} of {program} is taken{_holder(port)} ({error.strerror}); "
                f"end what listens there or give another port with {flag}"
            ) from error


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            listening = connection.status == psutil.CONN_LISTEN and address and address.port == port
            if listening and connection.pid is not None:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""
