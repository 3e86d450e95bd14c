"""Trains a team of two agents in a LangGraph, who both speak with the trained model.

    python -m examples.langgraph_team.train --seed 0 --run-dir runs/langgraph_team-0

A proposer, who sees Ann's calendar, and a checker, who sees Ben's, look for a time at which both are free. Starts the
whole installation, runs groups of teams while the trainer learns from them, and then compares the base model and the
last version on held-out calendars."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import anyio
import httpx
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from pydantic import SecretStr

from examples.common import curve, running
from examples.langgraph_team.calendars import ROUNDS, Scenario, find_time, scenario
from journeywork import Trajectory

MODEL = "langgraph_team"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
GROUPS_PER_STEP = 12
SETTINGS = {"trainer.groups_per_step": GROUPS_PER_STEP}

HTTP = httpx.AsyncClient(timeout=120)
"""One pool of connections for all agents."""


class State(TypedDict):
    """What the two have said so far."""

    proposed: str
    refused: Annotated[list[str], operator.add]
    agreed: bool


@dataclass(frozen=True)
class Meeting:
    """What one run of the graph is about."""

    task: Scenario
    llm: ChatOpenAI


async def propose(state: State, runtime: Runtime[Meeting]) -> dict[str, Any]:
    """The proposer names a time."""
    meeting = runtime.context
    reply = await meeting.llm.ainvoke(meeting.task.for_proposer(state["refused"]))
    return {"proposed": find_time(reply.text)}


async def check(state: State, runtime: Runtime[Meeting]) -> dict[str, Any]:
    """The checker accepts or refuses it."""
    meeting = runtime.context
    reply = await meeting.llm.ainvoke(meeting.task.for_checker(state["proposed"]))
    agreed = reply.text.strip().lower().startswith("yes")
    return {"agreed": agreed, "refused": [] if agreed else [state["proposed"]]}


def go_on(state: State) -> Literal["propose", "__end__"]:
    """Return the node after the checker's: another round, or the end."""
    return END if state["agreed"] or len(state["refused"]) == ROUNDS else "propose"


def build_graph() -> Any:
    graph = StateGraph(State, context_schema=Meeting)
    graph.add_node("propose", propose)
    graph.add_node("check", check)
    graph.add_edge(START, "propose")
    graph.add_edge("propose", "check")
    graph.add_conditional_edges("check", go_on)
    return graph.compile()


TEAM = build_graph()


async def meet(run: Trajectory, task: Scenario) -> float:
    """One run of the team. Both agents are one trajectory, and share its reward."""
    llm = ChatOpenAI(
        model=MODEL, base_url=run.base_url, api_key=SecretStr(run.api_key), max_retries=8, http_async_client=HTTP,
        max_completion_tokens=16, temperature=1.0,
    )  # fmt: skip
    start: State = {"proposed": "", "refused": [], "agreed": False}
    end = await TEAM.ainvoke(start, context=Meeting(task, llm))
    proposals = len(end["refused"]) + end["agreed"]
    run.metrics = {"agreed": float(end["agreed"]), "proposals": proposals}
    return task.reward(end["proposed"] if end["agreed"] else "", proposals)


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=30, held_out=200, base=BASE)
    async with running.installation(args, SETTINGS) as client:
        compared = await running.train_and_compare(
            client, args, lambda n: scenario("train", n, args.seed), meet, lambda n: scenario("val", n),
            groups_per_step=GROUPS_PER_STEP,
        )  # fmt: skip
    curve.report(args, compared)


if __name__ == "__main__":
    anyio.run(main)
