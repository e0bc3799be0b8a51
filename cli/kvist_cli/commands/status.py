"""`kvist status`: what runs on this machine, how it does, what the cache gives."""

from __future__ import annotations

import os
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from kvist_cli import target
from kvist_cli.asking import NOBODY, Credentials, answers_ok, ask_all
from kvist_cli.commands.credentials import identified
from kvist_cli.commands.hits import read_hits
from kvist_cli.commands.options import Agents, AsJson, ClusterName, RouterAdmin, RunDir
from kvist_cli.local.identity import alive
from kvist_cli.local.state import ClusterState, Phase, ProgramState
from kvist_cli.output import console, print_json
from kvist_connector.log_lines import plain
from kvist_connector.names import PATH_HEALTHZ, PATH_REPLICAS, PATH_STATS
from kvist_connector.quantity import counted, format_bytes
from kvist_operator.plan import Role

EXAMPLES: Final = """
Examples:

  kvist status

  kvist status demo --json | jq .healthy

  kvist status --agent http://127.0.0.1:8200 --router http://127.0.0.1:8081 --token-file TOKEN
"""
STARTING: Final = "starting"
_BEFORE: Final = (Phase.WAITING, Phase.STARTING)
_HEALTH: Final = {Role.ENGINE: "/health", Role.AGENT: PATH_HEALTHZ, Role.ROUTER: PATH_HEALTHZ}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status", epilog=EXAMPLES)(identified(status))


def status(
    credentials: Credentials,
    name: ClusterName = None,
    run_dir: RunDir = None,
    agent: Agents = [],  # noqa: B006
    router: RouterAdmin = None,
    json: AsJson = False,
) -> None:
    """Programs, health, ports, tiers and hits of a cluster. Exit code 1 when something is not healthy."""
    elsewhere = bool(agent or router)
    if elsewhere:
        report = gather_by_address(target.by_address(agent), router, credentials)
    else:
        report = gather(target.read(target.find(name, run_dir, os.environ)), credentials)
    if json:
        print_json(report)
    else:
        (_show_answers if elsewhere else show)(report)
    if not report["healthy"]:
        raise typer.Exit(1)


def gather_by_address(agents: dict[str, str], router: str | None, who: Credentials) -> dict[str, Any]:
    """What programs say that run elsewhere, such as on Kubernetes behind a port-forward."""
    admin = router.rstrip("/") if router else None
    asked = {name: url + PATH_STATS for name, url in agents.items()}
    answers = ask_all("GET", asked, who=who.for_agents())
    said = ask_all("GET", {"router": admin + PATH_REPLICAS}, who=who)["router"] if admin else None
    found = [*answers.values(), *([said] if said is not None else [])]
    return {
        "healthy": all(set(answer) != {"error"} for answer in found),
        "agents": answers,
        "router": said,
        "hits": read_hits(admin, who) if admin and said is not None and "error" not in said else None,
    }


def gather(state: ClusterState, who: Credentials = NOBODY) -> dict[str, Any]:
    """The report as plain data."""
    supervised = alive(state.supervisor)
    urls = {p.name: p.url + PATH_STATS for p in state.programs if p.role is Role.AGENT}
    urls |= {p.name: state.admin_url + PATH_REPLICAS for p in state.programs if p.role is Role.ROUTER}
    # Who is starting cannot answer yet, and says nothing new by that.
    starting = {p.name for p in state.programs if supervised and p.phase in _BEFORE}
    said = ask_all("GET", {name: url for name, url in urls.items() if name not in starting}, who=who)
    said |= {name: {"error": STARTING} for name in urls.keys() & starting}
    programs = [_program(p, supervised) for p in state.programs]
    router = next((said[p.name] for p in state.programs if p.role is Role.ROUTER), None)
    return {
        "name": state.name,
        "model": state.model,
        "healthy": supervised and all(p["healthy"] for p in programs),
        "supervisor": {"pid": state.supervisor.pid, "alive": supervised},
        "logs": str(state.programs[0].log.parent) if state.programs else None,
        "endpoint": next((f"{p.url}/v1" for p in state.programs if p.role is Role.ROUTER), None),
        "programs": programs,
        "agents": {p.replica: said[p.name] for p in state.programs if p.role is Role.AGENT},
        "router": router,
        "hits": read_hits(state.admin_url) if router is not None and "error" not in router else None,
    }


def _program(program: ProgramState, supervised: bool) -> dict[str, Any]:
    running = program.identity is not None and alive(program.identity)
    return {
        "name": program.name,
        "replica": program.replica or None,
        "phase": program.phase.value if running or supervised else Phase.STOPPED.value,
        "healthy": running and answers_ok(program.url + _HEALTH[program.role]),
        "pid": program.identity.pid if program.identity is not None and running else None,
        "restarts": program.restarts,
        "url": program.url,
        "ports": program.ports,
        "log": str(program.log),
        "message": program.message,
    }


def show(report: dict[str, Any]) -> None:
    """For people."""
    out = console()
    supervisor = report["supervisor"]
    alive_text = "" if supervisor["alive"] else " [red](dead: `kvist down` or `kvist up` cleans up)[/red]"
    out.print(f"[bold]{report['name']}[/bold]  {escape(plain(report['model']))}  {report['endpoint']}")
    out.print(f"supervisor pid {supervisor['pid']}{alive_text}")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("program", "health", "phase", "pid", "restarts", "ports"):
        table.add_column(column, overflow="fold")
    for p in report["programs"]:
        health = "[green]healthy[/green]" if p["healthy"] else "[red]not healthy[/red]"
        if not p["healthy"] and p["phase"] in _BEFORE:
            health = "[yellow]not yet[/yellow]"
        ports = ", ".join(f"{name} {port}" for name, port in p["ports"].items())
        table.add_row(p["name"], health, p["phase"], str(p["pid"] or "-"), str(p["restarts"]), ports)
    out.print(table)
    out.print(f"logs: {report['logs']}", markup=False)
    _show_answers(report)


def _show_answers(report: dict[str, Any]) -> None:
    out = console()
    for replica, answer in report["agents"].items():
        out.print(f"{replica}: {tier_line(answer)}", markup=False)
    out.print(f"router: {router_line(report['router'])}", markup=False)
    if report["hits"] is not None:
        out.print(
            f"hits since the router started: {hit_line(report['hits'], _prefill_measured(report['router']))}",
            markup=False,
        )


def router_line(answer: dict[str, Any] | None) -> str:
    """What the router sees of its replicas."""
    if answer is None or set(answer) == {"error"}:
        return str(answer["error"]) if answer else "none"
    parts = [f"{counted(answer['in_flight'], 'request')} in flight"]
    for replica in answer["replicas"]:
        feed = "index live" if replica["feed"]["live"] else "no index"
        health = "healthy" if replica["healthy"] else f"not healthy ({replica['problem']})"
        parts.append(f"{replica['name']} {health}, {feed}")
    return "; ".join(parts)


def _prefill_measured(router: dict[str, Any] | None) -> bool:
    return any(replica.get("prefill_measured", True) for replica in (router or {}).get("replicas", ()))


def hit_line(hits: dict[str, Any], measured: bool = True) -> str:
    """The three figures; `measured`: whether an engine has told how fast it computes prompts."""
    if set(hits) == {"error"}:
        return str(hits["error"])
    if hits["requests"] is None:
        return "no requests recorded yet"
    saved = (
        f"{hits['seconds_saved']:.1f} s of prefill saved (estimated)"
        if measured
        else "prefill saved is not measured yet"
    )
    return (
        f"{100 * hits['requests']:.1f} % of requests, {100 * hits['tokens']:.1f} % of prompt tokens, {saved}"
    )


def tier_line(stats: dict[str, Any]) -> str:
    """One agent's tiers and hits in a line."""
    if set(stats) == {"error"}:
        return str(stats["error"])
    tiers = [
        f"{tier} {counted(figures['chunks'], 'chunk')}, {format_bytes(figures['bytes'])}"
        for tier, figures in stats["tiers"].items()
    ]
    reused, prompt = sum(stats["hit_tokens"].values()), stats["prompt_tokens"]
    share = f" ({100 * reused / prompt:.0f} %)" if prompt else ""
    hits = f"{stats['hits']['requests']} of {counted(stats['requests'], 'request')} hit"
    return "; ".join((*tiers, hits, f"{reused:,} of {counted(prompt, 'prompt token')} reused{share}"))
