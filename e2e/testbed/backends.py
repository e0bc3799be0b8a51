"""Shared backends that a cluster does not manage, in pods: a Redis that speaks TLS alone, and an S3 server.

Their Secrets are what a user would make: `redis` (password, ca.crt), `s3` (credentials).
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import obstore
import redis
from obstore.store import S3Store

from testbed.certificates import Identity, sign
from testbed.host_folders import Object
from testbed.images import FileImage, ImageStore
from testbed.kube import Kubectl
from testbed.small_pods import apply, pod, ready

REDIS_PORT, S3_PORT = 6380, 7070
REDIS_IMAGE = "kvist.dev/redis:e2e"
PASSWORD, BUCKET, ACCESS, SECRET = "pass-e2e", "chunks", "e2e-access", "e2e-secret"
CREDENTIALS = f"[default]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {SECRET}\n"


@dataclass(frozen=True)
class Backends:
    """Those of one namespace, by addresses that the machine reaches."""

    redis: redis.Redis
    objects: S3Store

    def in_redis(self) -> Iterator[bytes]:
        """Every value."""
        for key in self.redis.scan_iter("kvist:*"):
            value = self.redis.get(key)
            if isinstance(value, bytes):
                yield value

    def in_bucket(self) -> Iterator[bytes]:
        """Every object."""
        for batch in obstore.list(self.objects):
            for item in batch:
                yield bytes(obstore.get(self.objects, item["path"]).bytes())


def remote(namespace: str) -> Object:
    """spec.cache.remote. Deadlines are those of a machine that may be busy."""
    patient = {"lookupDeadline": "10s", "deadline": "30s"}
    return {
        "redis": {
            "urls": [f"rediss://redis.{namespace}.svc:{REDIS_PORT}"],
            "password": {"name": "redis", "key": "password"},
            "ca": {"name": "redis", "key": "ca.crt"},
            **patient,
        },
        "objectStore": {
            "url": f"s3://{BUCKET}/e2e",
            "endpoint": f"http://s3.{namespace}.svc:{S3_PORT}",
            "region": "us-east-1",
            "credentials": {"name": "s3", "key": "credentials"},
            **patient,
        },
    }


def secret(name: str, **texts: str) -> Object:
    """A Secret."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts}


def certificate_files(name: str, *fields: str) -> Object:
    """A section of a manifest that takes these of a certificate's files from the Secret `name`."""
    files = {"certificate": "tls.crt", "privateKey": "tls.key", "ca": "ca.crt"}
    return {field: {"name": name, "key": files[field]} for field in fields or files}


def certificate(kubectl: Kubectl, name: str, host: str) -> dict[str, str]:
    """tls.crt, tls.key and ca.crt for a host name, by the bed's authority."""
    pki = kubectl.bed.pki
    sign(kubectl.bed, Identity(name, name, "kvist", f"DNS:{host}"))
    files = {"tls.crt": pki / f"{name}.crt", "tls.key": pki / f"{name}.key", "ca.crt": pki / "ca.crt"}
    return {file: path.read_text() for file, path in files.items()}


def start(kubectl: Kubectl, namespace: str) -> Backends:
    """Both, ready."""
    s3 = FileImage(
        "kvist.dev/versitygw:e2e", "/versitygw", {"/versitygw": kubectl.catalogue.path("versitygw")}
    )
    ImageStore(kubectl.bed, kubectl.catalogue).bring(s3)
    tls = certificate(kubectl, f"redis-{namespace}", f"redis.{namespace}.svc")
    apply(
        kubectl, namespace, secret("redis", password=PASSWORD, **tls), secret("s3", credentials=CREDENTIALS),
        redis_pod(), s3_pod(s3.reference), service("redis", REDIS_PORT), service("s3", S3_PORT),
    )  # fmt: skip
    ready(kubectl, namespace, "redis", "s3")
    addresses = {
        name: kubectl.get(f"pod/{name}", f"--namespace={namespace}")["status"]["podIP"]
        for name in ("redis", "s3")
    }
    return Backends(
        # By address: the machine does not resolve the name that its certificate has.
        redis.Redis(addresses["redis"], REDIS_PORT, password=PASSWORD, ssl=True, ssl_check_hostname=False,
                    ssl_ca_certs=str(kubectl.bed.pki / "ca.crt"), ssl_cert_reqs=ssl.CERT_REQUIRED),
        S3Store(BUCKET, endpoint=f"http://{addresses['s3']}:{S3_PORT}", region="us-east-1",
                access_key_id=ACCESS, secret_access_key=SECRET, client_options={"allow_http": True}),
    )  # fmt: skip


def redis_pod() -> Object:
    """No port without TLS."""
    options = {
        "port": "0", "tls-port": str(REDIS_PORT), "tls-cert-file": "/secret/tls.crt",
        "tls-key-file": "/secret/tls.key", "tls-ca-cert-file": "/secret/ca.crt", "tls-auth-clients": "no",
        "requirepass": PASSWORD, "save": "''", "maxmemory": "192mb", "dir": "/tmp",
    }  # fmt: skip
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    container = {
        **probed(REDIS_PORT),
        "image": REDIS_IMAGE,
        "volumeMounts": [{"name": "secret", "mountPath": "/secret", "readOnly": True}],
    }
    volumes = [{"name": "secret", "secret": {"secretName": "redis"}}]
    return pod("redis", "sh", "-c", f"exec redis-server {words}", container=container, volumes=volumes)


def s3_pod(image: str) -> Object:
    """A bucket is a folder below the server's."""
    places = {"root": "/root-folder", "bucket": f"/root-folder/{BUCKET}", "sidecar": "/sidecar"}
    container = {
        **probed(S3_PORT),
        "image": image,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
    }
    command = ("/versitygw", "--port", f":{S3_PORT}", "--keep-alive", "--access", ACCESS, "--secret", SECRET,
               "posix", "--sidecar", places["sidecar"], places["root"])  # fmt: skip
    volumes: list[Any] = [{"name": name, "emptyDir": {}} for name in places]
    return pod("s3", *command, container=container, volumes=volumes)


def probed(number: int) -> Object:
    """Part of a container that is ready when its port answers."""
    return {"readinessProbe": {"tcpSocket": {"port": number}, "periodSeconds": 1}}


def service(name: str, number: int) -> Object:
    """Of the pod of that name."""
    spec = {"selector": {"app": name}, "ports": [{"port": number}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
