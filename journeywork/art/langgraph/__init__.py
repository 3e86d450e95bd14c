"""LangGraph agents whose calls become a trajectory. It needs langchain-openai.

| module | contents |
| --- | --- |
| `llm_wrapper` | `init_chat_model` and `wrap_rollout` |
| `conversations` | the trajectory that calls make up |
"""

from journeywork.art.langgraph.llm_wrapper import init_chat_model as init_chat_model
from journeywork.art.langgraph.llm_wrapper import wrap_rollout as wrap_rollout
