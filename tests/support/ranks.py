"""A group of processes that stays, so that not every test has to start one."""

from __future__ import annotations

import functools
import os
import runpy
import socket
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

TIMEOUT = 180
# A new system need not know the name localhost.
HERE = "127.0.0.1"


class Ranks:
    """Runs functions on all processes at once. Whatever does not end in time is killed."""

    def __init__(self, count: int) -> None:
        context = get_context("spawn")
        with socket.socket() as free:
            free.bind((HERE, 0))
            port = free.getsockname()[1]
        self.connections, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, port, there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, file: str, name: str, arguments: dict[str, Any]) -> None:
        """A function of a file of tests. Fails with the traceback of the first process that did."""
        for connection in self.connections:
            connection.send((file, name, arguments))
        for rank, connection in enumerate(self.connections):
            failure = f"no answer in {TIMEOUT} s"
            if connection.poll(TIMEOUT):
                failure = connection.recv()
            if failure:
                self.kill()
                raise AssertionError(f"rank {rank}: {failure}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=HERE, MASTER_PORT=str(port))
    dist.init_process_group(
        "gloo", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT / 2)
    )
    module = functools.cache(runpy.run_path)
    while True:
        file, name, arguments = connection.recv()
        try:
            module(file)[name].__wrapped__(**arguments)
            connection.send("")
        except BaseException:
            connection.send(traceback.format_exc())
