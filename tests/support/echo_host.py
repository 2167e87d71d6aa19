"""A host process that takes the place of `engines.vllm.host`. It reports the settings it got and starts nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from teola_plugin.engines.vllm.link import Link, NotReady


async def main() -> None:
    link = await Link.connect(socket.socket(fileno=int(sys.argv[1])))
    setup = await link.receive()
    report = {"engine_args": dict(setup.engine_args), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    link.send(NotReady(f"<{json.dumps(report)}>"))
    await link.flushed()


if __name__ == "__main__":
    asyncio.run(main())
