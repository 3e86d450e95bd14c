"""Claude Code and Codex CLI as programs: two turns of one conversation, each of tool calls and a text,
streamed.

    cli_agent.py claude|codex NODE PROGRAM PYTHON [TURN...]

Both get their one tool from `game_server.py`, and a home of their own with nothing in it but these settings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

kind, node, program, python, *turns = sys.argv[1:]
turns = turns or ["a1=x", "b2=o"]
home = Path(tempfile.mkdtemp(dir=os.environ["AGENT_FOLDER"]))
work = home / "work"
work.mkdir()
log = home / "moves"
log.touch()
server = str(Path(__file__).with_name("game_server.py"))
environment = {**os.environ, "HOME": str(home), "NO_COLOR": "1", "GAME_LOG": str(log)}


def run(*arguments: str) -> str:
    command = [program] if kind == "claude" else [node, program]
    done = subprocess.run(
        [*command, *arguments],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    if done.returncode:
        raise SystemExit(f"{program} {arguments}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def codex(*arguments: str) -> str:
    text = ""
    for line in run("exec", *arguments).splitlines():
        item = json.loads(line).get("item", {}) if line.startswith("{") else {}
        if item.get("type") == "agent_message":
            text += item["text"]
    return text


def claude(*arguments: str) -> str:
    allowed = ("--allowedTools", "mcp__games__move,Bash(echo:*)", "--mcp-config", f"{home}/mcp.json")
    result = json.loads(run(*arguments, "-p", "--output-format", "json", *allowed))
    assert not result["is_error"], result
    return str(result["result"])


if kind == "claude":
    environment |= {
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ANTHROPIC_MODEL": "tictactoe",
        "ANTHROPIC_SMALL_FAST_MODEL": "tictactoe",
    }
    games = {"command": python, "args": [server], "env": {"GAME_LOG": str(log)}}
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {"games": games}}))
    text = "".join(claude(turn, *(["--continue"] if number else [])) for number, turn in enumerate(turns))
else:
    folder = home / ".codex"
    folder.mkdir()
    environment["CODEX_HOME"] = str(folder)
    (folder / "instructions.md").write_text("Play.")
    (folder / "config.toml").write_text(f"""
model = "tictactoe"
model_provider = "gateway"
model_instructions_file = "{folder}/instructions.md"
web_search = "live"
check_for_update_on_startup = false
approval_policy = "never"
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = "{os.environ["OPENAI_BASE_URL"]}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[mcp_servers.games]
command = "{python}"
args = ["{server}"]
env = {{ GAME_LOG = "{log}" }}
default_tools_approval_mode = "approve"
startup_timeout_sec = 120
required = true
[features]
plugins = false
""")
    flags = ("--json", "--skip-git-repo-check")
    text = codex(*flags, "-s", "read-only", "a1=x")
    text += codex("resume", "--last", *flags, "b2=o")
print(json.dumps({"cells": log.read_text().split(), "text": text}))
