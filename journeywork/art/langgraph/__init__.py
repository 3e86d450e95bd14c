"""LangGraph agents whose calls become a trajectory. It needs langchain-openai.

| module | contents |
| --- | --- |
| `llm_wrapper` | `init_chat_model` and `wrap_rollout` |
"""

from typing import TYPE_CHECKING

from journeywork.art.langgraph.llm_wrapper import init_chat_model, wrap_rollout
from journeywork.art.refused import refused_parts

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)

__all__ = ["init_chat_model", "wrap_rollout"]
