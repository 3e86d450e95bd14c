"""LangGraph agents whose calls become a trajectory."""
