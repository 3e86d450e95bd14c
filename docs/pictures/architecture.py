"""Draw architecture.svg from the rights that each service has on the log: what it publishes, and what it is sent.

A right that a service gains or loses changes the picture; tests/test_architecture.py compares the two.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from pipeline import streams
from pipeline.security.users import USERS, User

SERVICES = ("gateway", "sampler", "judge", "trainer", "store", "telemetry")
BESIDE = {
    "gateway": "agents, inference servers and providers over HTTP",
    "sampler": "its inference server over HTTP",
    "judge": "a judge model over HTTP, or functions in a sandbox",
    "trainer": "GPUs; checkpoints on disk",
    "store": "Parquet files; dashboard and SQL",
    "telemetry": "OpenTelemetry backends",
}
"""What a service works with beside the log."""
COLUMNS = ("ROLLOUTS", "GROUPS", "POLICY", streams.ADAPTERS_BUCKET)
BOX, FIRST, GAP, ROW, TOP = 320, 530, 190, 92, 96
STYLE = (
    "text{font:13px sans-serif;fill:#1f2933}.name{font-weight:600;font-size:15px}.small{font-size:11px;fill:#52606d}"
    ".box{fill:#eef2f7;stroke:#9aa5b1}.bar{stroke:#cbd2d9;stroke-width:14}.out{stroke:#b44d12;fill:#b44d12}"
    ".in{stroke:#0b69a3;fill:#0b69a3}line.out,line.in{stroke-width:1.6}"
)


def links(user: User) -> dict[str, tuple[list[str], bool]]:
    """Return by stream or bucket what a service writes there, and whether it is sent what others write."""
    of_consumer = {c.name: c.stream for c in streams.CONSUMERS}
    sent = {*user.follows, *user.fetches, *(of_consumer[name] for name in user.consumes)}
    found: dict[str, tuple[list[str], bool]] = {}
    for column in COLUMNS:
        spec = next((s for s in streams.STREAMS if s.name == column), None)
        first = {subject.partition(".")[0] for subject in spec.subjects} if spec else set()
        own = [s.rstrip(".*>").partition(".") for s in user.publishes if s.partition(".")[0] in first]
        writes = [rest or "every event" for _, _, rest in own] + (["adapters"] if column in user.stores else [])
        if writes or column in sent:
            found[column] = (writes, column in sent)
    return found


def arrow(kind: str, x1: int, x2: int, y: int) -> str:
    head = 8 if x2 > x1 else -8
    return (
        f'<line class="{kind}" x1="{x1}" x2="{x2 - head}" y1="{y}" y2="{y}"/>'
        f'<path class="{kind}" d="M{x2} {y}l{-head} -4v8z"/>'
    )


def draw() -> str:
    """Return the picture as SVG."""
    width, height = FIRST + GAP * len(COLUMNS) - 60, TOP + ROW * len(SERVICES) + 40
    x_of = {column: FIRST + GAP * n for n, column in enumerate(COLUMNS)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text class="name" x="20" y="34">Services</text>',
        '<text class="small" x="20" y="52">each with what it works with beside the log</text>',
        f'<text class="name" x="{FIRST - 60}" y="34">The log (NATS JetStream): streams and a bucket</text>',
    ]
    for column, x in x_of.items():
        parts.append(f'<text class="name" x="{x}" y="66" text-anchor="middle">{escape(column)}</text>')
        parts.append(f'<line class="bar" x1="{x}" x2="{x}" y1="76" y2="{height - 40}"/>')
    users = {user.name: user for user in USERS}
    for n, name in enumerate(SERVICES):
        y = TOP + ROW * n
        parts.append(f'<rect class="box" x="20" y="{y}" width="{BOX}" height="{ROW - 22}" rx="6"/>')
        parts.append(f'<text class="name" x="32" y="{y + 20}">{escape(name)}</text>')
        parts.append(f'<text x="32" y="{y + 39}">{escape(users[name].purpose)}</text>')
        parts.append(f'<text class="small" x="32" y="{y + 57}">{escape(BESIDE[name])}</text>')
        for k, (column, (writes, sent)) in enumerate(links(users[name]).items()):
            x = x_of[column] - 7
            if writes:
                parts.append(arrow("out", 20 + BOX, x, y + 14 + 7 * k))
                label = escape(", ".join(writes))
                parts.append(f'<text class="small" x="{x - 12}" y="{y + 10 + 7 * k}" text-anchor="end">{label}</text>')
            if sent:
                parts.append(arrow("in", x, 20 + BOX, y + 42 + 7 * k))
    parts.append(
        f'<text class="small" x="20" y="{height - 14}">orange: publishes, by kind of event. blue: is sent.</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), "utf-8")
