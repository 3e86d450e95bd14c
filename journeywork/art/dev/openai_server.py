"""The options of the inference server, where ART defines them."""

from journeywork.art.dev import OpenAIServerConfig, ServerArgs, get_openai_server_config

__all__ = ["OpenAIServerConfig", "ServerArgs", "get_openai_server_config"]
