"""Composition root of the operator: settings in, a running operator out. Called by __main__.py only."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version

import aiohttp
from prometheus_client import CollectorRegistry

from kvist_connector import names
from kvist_connector.errors import ConfigError
from kvist_connector.log_lines import log_to_stderr
from kvist_connector.settings import add_flags, load, program_parser, to_yaml
from kvist_operator.control.acts import Acts
from kvist_operator.control.api import Api, Key
from kvist_operator.control.ask import HttpPrograms, Programs
from kvist_operator.control.counted import CountedApi
from kvist_operator.control.errors import ApiError
from kvist_operator.control.fenced import FencedApi
from kvist_operator.control.gather import Gatherer
from kvist_operator.control.health import serving
from kvist_operator.control.journal import Journal
from kvist_operator.control.lease import Elector, LeaseTerms
from kvist_operator.control.login import login
from kvist_operator.control.metrics import Metrics
from kvist_operator.control.parting import Parting
from kvist_operator.control.poll import RouterPoll
from kvist_operator.control.queue import Backoff, WorkQueue
from kvist_operator.control.reconcile import Reconciler
from kvist_operator.control.rest import RestApi
from kvist_operator.control.runtime import Loops, Operator
from kvist_operator.control.supervise import Supervisor
from kvist_operator.control.sweep import Sweep
from kvist_operator.control.vitals import Vitals
from kvist_operator.control.watch import Watches
from kvist_operator.control.workers import Workers
from kvist_operator.release import HANDOVER_SECONDS, release
from kvist_operator.render.kube import Context, Images
from kvist_operator.settings import OperatorSettings
from kvist_operator.webhook.run import admission

_log = logging.getLogger(__name__)

_EXAMPLES = """examples:
  python -m kvist_operator                                   # in a pod: its service account, all namespaces
  KUBECONFIG=admin.conf python -m kvist_operator --watch-namespaces '[team-a, team-b]'
  python -m kvist_operator --config operator.yaml --print-config
  python -m kvist_operator release --config operator.yaml    # before it is uninstalled
"""


def run(arguments: list[str]) -> int:
    """Parse, build, work until a signal; returns the exit status."""
    releasing = arguments[:1] == ["release"]
    parsed = (_release_parser() if releasing else _parser()).parse_args(
        arguments[1:] if releasing else arguments
    )
    try:
        settings = load(OperatorSettings, parsed, os.environ, names.ENV_OPERATOR)
        if parsed.print_config:
            sys.stdout.write(to_yaml(settings))
            return 0
        _configure_logs(settings.log_level)
        asyncio.run(_release(settings, parsed.deployment) if releasing else _until_signal(settings))
    except ConfigError as error:
        sys.stderr.write(f"kvist-operator: {error}\n")
        return 2
    except ApiError as error:
        sys.stderr.write(f"kvist-operator: API server: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = program_parser(
        "python -m kvist_operator",
        "Makes CacheCluster objects run: engines, caches, routers.",
        _EXAMPLES,
        f"kvist {version('kvist')}",
    )
    add_flags(parser, OperatorSettings, names.ENV_OPERATOR)
    return parser


def _release_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvist_operator release",
        usage="%(prog)s [--deployment NAME] [--config FILE] [--SETTING VALUE ...]",
        description="Takes the operator's finalizer off all CacheClusters: no deletion waits for it then.",
    )
    parser.add_argument("--deployment", metavar="NAME", help="the operator's Deployment, scaled to 0 first")
    add_flags(parser, OperatorSettings)
    return parser


async def _release(settings: OperatorSettings, deployment: str | None) -> None:
    async with RestApi(login, settings.api_seconds) as api:
        elector = Elector(api, terms(settings, settings.identity or f"release_{secrets.token_hex(4)}"))
        place = (settings.namespace, deployment) if deployment is not None else None
        seconds = settings.lease.duration_seconds + HANDOVER_SECONDS
        freed = await release(api, elector, settings.watch_namespaces or (None,), place, seconds)
    _log.info("%s CacheClusters had the finalizer", freed)


def _configure_logs(level: str) -> None:
    log_to_stderr(level.upper())
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.ERROR)


async def _until_signal(settings: OperatorSettings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with (
        RestApi(login, settings.api_seconds) as api,
        aiohttp.ClientSession(trust_env=False) as session,
        operating(settings, api, HttpPrograms(session)) as operator,
    ):
        supervisor = operator.supervisor
        watch = Watches(api, login, operator.queue.add, settings.watch_namespaces)
        watching = supervisor.start("watches", watch.run)
        await stop.wait()
        _log.info("ending")
        await supervisor.stop(watching)


@asynccontextmanager
async def operating(settings: OperatorSettings, bare: Api, programs: Programs) -> AsyncIterator[Operator]:
    """Everything wired, taking part in the election; raises ConfigError. Watches are left to the caller."""
    registry, clock = CollectorRegistry(), asyncio.get_running_loop().time
    metrics = Metrics(registry)
    supervisor = Supervisor(metrics, Vitals(clock))
    api = CountedApi(bare, metrics.called)
    identity = settings.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}"
    queue: WorkQueue[Key] = WorkQueue(settings.max_clusters, Backoff(), clock)
    elector = Elector(api, terms(settings, identity), clock=clock)
    fenced = FencedApi(api, elector.remaining)
    journal = Journal(fenced, clock, now)
    gatherer = Gatherer(fenced, programs, now)
    acts = Acts(fenced, programs, journal)
    parting = Parting(fenced, programs, gatherer, journal)
    reconciler = Reconciler(fenced, gatherer, acts, parting, journal, context(settings), clock)
    workers = Workers(queue, reconciler, metrics, clock, settings.workers)
    poll = RouterPoll(programs, reconciler.known, queue.add, clock)
    namespaces = settings.watch_namespaces or (None,)
    operator = Operator(
        identity=identity,
        api=api,
        queue=queue,
        elector=elector,
        workers=workers,
        loops=Loops(
            sweep=lambda: Sweep(api, queue.add, namespaces),
            sweep_seconds=settings.sweep_seconds,
            poll=poll,
            poll_seconds=settings.poll_seconds,
            kinds=gatherer.ask_kinds,
        ),
        supervisor=supervisor,
    )
    metrics.watch(lambda: float(elector.leading), lambda: len(queue), lambda: len(reconciler.known))
    async with (
        serving(settings.host, settings.port, registry, operator.problem, operator.unready) as port,
        operator.running(),
        admission(settings, fenced, context(settings), lambda: elector.leading, now, supervisor),
    ):
        _log.info("%s: health checks and metrics on port %s", identity, port)
        yield replace(operator, port=port)


def terms(settings: OperatorSettings, identity: str) -> LeaseTerms:
    """Of the leader election."""
    lease = settings.lease
    return LeaseTerms(
        namespace=settings.namespace,
        name=lease.name,
        identity=identity,
        duration=lease.duration_seconds,
        renew=lease.renew_seconds,
        retry=lease.retry_seconds,
    )


def context(settings: OperatorSettings) -> Context:
    """What is the same for all clusters when they are rendered."""
    images = settings.images
    return Context(
        namespace="",
        uid="",
        images=Images(images.engine, images.router, images.agent or images.engine, images.redis),
        operator_namespace=settings.namespace,
        image_pull_secrets=images.pull_secrets,
        pull_policy=images.pull_policy,
        docs_url=settings.docs_url,
    )


def now() -> datetime.datetime:
    """Wall-clock time, to compare with timestamps of the API server."""
    return datetime.datetime.now(datetime.UTC)
