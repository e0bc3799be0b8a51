"""The webhook of one operator: its server, and the loop that keeps its certificates. Called by app.py."""

from __future__ import annotations

import datetime
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvist_operator.control.api import Api
from kvist_operator.control.supervise import Supervisor
from kvist_operator.render.kube import Context
from kvist_operator.settings import OperatorSettings
from kvist_operator.webhook.keeper import Keeper, Place, Reader
from kvist_operator.webhook.server import Tls, listening

_log = logging.getLogger(__name__)


@asynccontextmanager
async def admission(
    settings: OperatorSettings,
    api: Api,
    context: Context,
    leading: Callable[[], bool],
    now: Callable[[], datetime.datetime],
    supervisor: Supervisor,
) -> AsyncIterator[int]:
    """The port, 0 when the webhook is off. `api` refuses writes to who does not lead."""
    webhook = settings.webhook
    if not webhook.configuration:
        yield 0
        return
    tls, at = Tls(), place(settings)
    keeper, reader = Keeper(api, at, leading, now), Reader(api, at, tls.load)

    async def turn() -> None:
        try:
            await keeper.turn()
        finally:
            await reader.turn()

    async with listening(webhook.host, webhook.port, context, tls) as port:
        _log.info("webhook on port %s", port)
        keeping = supervisor.start("webhook", supervisor.every("webhook", webhook.seconds, turn))
        try:
            yield port
        finally:
            await supervisor.stop(keeping)


def place(settings: OperatorSettings) -> Place:
    """Where the certificates are; the API server calls the Service by its name in the cluster."""
    webhook = settings.webhook
    service = f"{webhook.service}.{settings.namespace}.svc"
    return Place(settings.namespace, webhook.secret, webhook.configuration, (service, *webhook.names))
