"""LangGraph agents whose calls become a trajectory. It needs langchain-openai.

| module | contents |
| --- | --- |
| `llm_wrapper` | `init_chat_model` and `wrap_rollout` |
| `conversations` | the trajectory that calls make up |
"""

from journeywork.art.langgraph.llm_wrapper import init_chat_model, wrap_rollout

__all__ = ["init_chat_model", "wrap_rollout"]
