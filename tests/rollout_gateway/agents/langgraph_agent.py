"""LangGraph with langchain-openai: a graph of model and tools, two games in one conversation, streamed."""

import json
import os
from typing import Any, Literal

from langchain_core.messages import AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

cells: list[str] = []


@tool
def move(cell: Literal["a1", "b2"]) -> str:
    """Play a cell."""
    cells.append(cell)
    return "ok"


model = ChatOpenAI(
    model="tictactoe",
    max_completion_tokens=75,
    logit_bias=json.loads(os.environ["AGENT_LOGIT_BIAS"]),
    seed=1,
    stream_usage=True,
)


def think(state: MessagesState) -> dict[str, Any]:
    after_tool = isinstance(state["messages"][-1], ToolMessage)
    bound = model.bind_tools([move], tool_choice="none" if after_tool else "move", strict=True)
    return {"messages": [bound.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([move]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile(checkpointer=InMemorySaver())

text, chunks = "", 0
for board in ("a1=x", "b2=o"):
    conversation: Any = {"configurable": {"thread_id": "1"}}
    for message, _ in agent.stream({"messages": [("user", board)]}, conversation, stream_mode="messages"):
        if isinstance(message, AIMessageChunk):
            chunks += 1
            text += message.text
print(json.dumps({"cells": cells, "text": text, "chunks": chunks}))
