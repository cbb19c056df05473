# mypy: allow-subclassing-any, allow-untyped-decorators
"""Runs an agent program for each rollout, against the rollout's own endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field, FiniteFloat, PositiveInt, field_validator

from in_process.client import FastTrainClient
from prime_rl import ConfigError
from program.dialects import for_policy
from program.models import FrozenModel, FrozenTable, open_models
from program.policy import PolicyClient
from program.reward import last_line, terms_of
from program.seam import HarnessError, Reward, TrainClient, forget, serve, server_of
from program.task import as_json, filled, task_of, unknown_places, with_paths

FOLDER = ".prime_rl"
"""In the rollout's working directory: what goes to the program, and what it writes."""
TASK = f"{FOLDER}/task.json"
STDOUT = f"{FOLDER}/stdout"
STDERR = f"{FOLDER}/stderr"

KEPT_OUTPUT = 16_384
"""Bytes of the end of stdout and of stderr in a rollout's record."""
MOST_OUTPUT = 64 * 2**20
"""Bytes of stdout, and of stderr, beyond which a file on this machine keeps only its end: a tool
that prints without an end would fill the disk."""
OUTPUT_SECONDS = 2.0
"""Between two looks at the size of the output."""
MOST_REWARD = 65_536
"""Bytes of a file with a reward."""

PLACES = ("prompt", "model", "base_url", "api_key", "task")

START = f"""
export PRIME_RL_TASK="$PWD/{TASK}" PRIME_RL_REWARD="$PWD/$1"
input="$2"
shift 2
: > {STDOUT}
: > {STDERR}
"$@" < "$input" >> {STDOUT} 2>> {STDERR}
"""
"""Runs the program. Its output goes to files, so it stays when the program is killed. It is
appended: what follows in a file that has been shortened would leave a gap otherwise."""

GROUP = f"{FOLDER}/group"
OWN_GROUP = f"echo $$ > {GROUP}"
END_OTHERS = "code=$?; trap '' TERM; kill -TERM 0; exit $code"
"""Ends what the program has left running. Only where the runtime gave it a process group, whose
number is in the file ``GROUP``: ``kill_group`` ends what ignores the signal."""
GRACE_SECONDS = 2.0
"""For what the program has left running to end by itself."""


class ProgramConfig(vf.HarnessConfig):
    """``harness = { id = "program", command = ["python", "agent.py"] }``"""

    command: list[str] = []
    """The program and its arguments. ``{prompt}``, ``{model}``, ``{base_url}``, ``{api_key}`` and
    ``{task}`` (the path of the JSON file) are replaced; with ``{prompt}``, stdin is empty. On this
    machine, a file is found from the folder in which the run was started."""
    dialect: Literal["openai", "anthropic"] | None = None
    """Set the variables of one API only, for programs that choose by them. None: of both. The
    endpoint answers Chat Completions, Responses and Messages in any case."""
    files: list[Path] = []
    """Files to copy into the working directory of each rollout: a container has no others."""
    fields: list[str] | None = None
    """Columns of the row that the program gets besides the prompt. None: all where the program
    gives the reward, otherwise none, because an agent that can read files would find the answer."""
    reward: Literal["taskset", "stdout", "file"] = "taskset"
    """Who gives the reward. ``stdout``: the last line that the program prints; ``file``: the file
    ``reward_file``. A number, or a JSON object of numbers that are added. The taskset's own terms
    stay in the record, with weight 0."""
    reward_file: str = "reward.json"
    """In the working directory; its path is in ``PRIME_RL_REWARD``."""
    models: dict[str, FrozenTable] = {}
    """Frozen models by the name that the program uses: ``{ judge = { name = "...", base_url =
    "..." } }``. Any other name is the policy."""
    max_programs: PositiveInt | None = 32
    """Rollouts of an env that are played and scored at once in one process, each with its program;
    further ones wait, and the env's ``timeout`` begins when they do. None: no limit but the run's
    ``max_inflight_rollouts``."""
    timeout: FiniteFloat | None = Field(None, gt=0)
    """Seconds until the program is killed. The rollout is scored and trains with what it has done.
    None: only the env's ``timeout`` ends it, and then the rollout has failed."""

    @property
    def max_episodes(self) -> int | None:
        """Core and its workers let no more episodes begin at once."""
        return self.max_programs

    @field_validator("command")
    @classmethod
    def _has_known_places(cls, command: list[str]) -> list[str]:
        unknown = unknown_places(command, PLACES)
        if unknown:
            places = ", ".join(f"{{{place}}}" for place in PLACES)
            raise ValueError(f"{{{unknown[0]}}} is no place; expected one of {places}")
        return command


class Run:
    """One rollout of a program: what stays between its segments and until it is scored."""

    def __init__(self, config: ProgramConfig, ctx: Any, trace: vf.Trace, secret: str) -> None:
        server = server_of(secret)
        session = server.sessions[secret]
        self.secret = secret
        self.policy: PolicyClient | None = None
        """None: the policy is asked for messages, and its own endpoint answers all APIs."""
        if isinstance(session.client, TrainClient):
            fast = FastTrainClient.of(session.client, server.stack)
            self.policy = session.client = PolicyClient(fast, trace, ctx)
        self.models: dict[str, FrozenModel] = open_models(config.models, server, trace)
        self.output = ""
        """The end of stdout of the last segment."""
        self.terms: dict[str, float] | None = None
        """The reward that the program gave."""
        serve(secret, self.dialect)

    def dialect(self, dialect: Any, model: str | None) -> Any:
        """The dialect that answers a request for ``model``."""
        frozen = self.models.get(model or "")
        if frozen is not None:
            return frozen.dialect(dialect)
        return dialect if self.policy is None else for_policy(dialect, self.policy)

    def close(self) -> None:
        forget(self.secret)
        for model in self.models.values():
            model.close()


async def kill_group(runtime: vf.Runtime) -> None:
    """Kill what is left of the program's process group after ``GRACE_SECONDS``."""
    try:
        group = int(await runtime.read(GROUP, max_bytes=20))
    except (OSError, ValueError, vf.SandboxError):  # it never started, or removed its files
        return
    if group < 2 or group == os.getpgrp():
        return
    clock = asyncio.get_running_loop().time
    deadline = clock() + GRACE_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        while clock() < deadline:
            os.killpg(group, 0)
            await asyncio.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


@asynccontextmanager
async def bounded_output(folder: Path | None) -> AsyncIterator[None]:
    """Shorten the outputs of a program in ``folder`` while it runs. None: it runs elsewhere."""

    ended = asyncio.Event()

    async def shorten() -> None:
        while folder is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(OUTPUT_SECONDS):
                    await ended.wait()
            if ended.is_set():
                return
            for name in (STDOUT, STDERR):
                with suppress(OSError):  # the program may have removed its files
                    await asyncio.to_thread(keep_end, folder / name)

    shortening = asyncio.create_task(shorten())
    try:
        yield
    finally:
        ended.set()
        await shortening  # its thread may have emptied a file whose end it is about to write


def keep_end(path: Path) -> None:
    """Shorten a file of more than ``MOST_OUTPUT`` bytes to its last ``KEPT_OUTPUT``. What the
    program writes just then may be lost, or stand before the end that is kept."""
    if path.stat().st_size <= MOST_OUTPUT:
        return
    with path.open("rb") as file:
        file.seek(-KEPT_OUTPUT, os.SEEK_END)
        end = file.read(KEPT_OUTPUT)
    os.truncate(path, 0)
    with path.open("ab") as file:  # the program goes on writing
        file.write(end)


class ProgramHarness(vf.Harness[ProgramConfig]):
    """One stateless instance serves many rollouts at once; ``Run`` has the state of each."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = True
    NEEDS_CONTAINER = False

    def __init__(self, config: ProgramConfig) -> None:
        super().__init__(config)
        if not config.command:
            raise ConfigError(
                "harness program: it has no command. Set the env's harness, such as "
                '{ id = "program", command = ["python", "agent.py"] }.'
            )
        self.runs: dict[str, Run] = {}
        """By the trace's id."""

    async def setup(self, runtime: vf.Runtime) -> None:
        for path in self.config.files:
            await runtime.write(path.name, await asyncio.to_thread(path.read_bytes))

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment: the program from its start to its exit."""
        if trace.id not in self.runs:
            self.runs[trace.id] = Run(self.config, ctx, trace, secret)
        config = self.config
        system, prompt = self.resolve_prompt(data)
        fields = config.fields
        if fields is None and config.reward == "taskset":
            fields = []
        models = ["policy", *config.models]
        task = task_of(data, system, prompt, fields, models=models, mcp_servers=mcp_urls)
        await runtime.write(TASK, as_json(task))

        is_local = runtime.type == "subprocess"
        command = with_paths(config.command, Path.cwd()) if is_local else config.command
        text = task["prompt"] if system is None else f"{system}\n\n{task['prompt']}"
        places = {
            "prompt": text,
            "model": ctx.model,
            "base_url": endpoint,
            "api_key": secret,
            "task": TASK,
        }
        script = f"{OWN_GROUP}\n{START}{END_OTHERS}" if is_local else START
        # A program that takes its prompt from the command may add what it finds on stdin.
        stdin = "/dev/null" if any("{prompt}" in part for part in command) else TASK
        argv = ["sh", "-c", script, "program", config.reward_file, stdin, *filled(command, places)]
        result: vf.ProgramResult | None = None
        try:
            async with (
                bounded_output(runtime.workdir if is_local else None),
                asyncio.timeout(config.timeout) as limit,
            ):
                result = await runtime.run_program(argv, self.variables(ctx, endpoint, secret))
        except TimeoutError:
            if not limit.expired():
                raise
            trace.stop("program_timeout")

        if is_local:
            await kill_group(runtime)
        code = -1 if result is None else result.exit_code
        stdout, stderr = await self.record(trace, runtime, code)
        self.runs[trace.id].output = stdout
        return vf.ProgramResult(code, stdout, stderr)

    def variables(self, ctx: vf.ModelContext, endpoint: str, secret: str) -> dict[str, str]:
        """Environment variables of the program."""
        openai = {
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_BASE": endpoint,
            "OPENAI_API_KEY": secret,
            "OPENAI_MODEL": ctx.model,
        }
        anthropic = {
            "ANTHROPIC_BASE_URL": endpoint.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": secret,
            "ANTHROPIC_MODEL": ctx.model,
        }
        dialect = self.config.dialect
        return {
            **self.config.resolved_env,
            **({} if dialect == "anthropic" else openai),
            **({} if dialect == "openai" else anthropic),
        }

    async def record(self, trace: vf.Trace, runtime: vf.Runtime, code: int) -> tuple[str, str]:
        """Put the program's end into the rollout's record. Returns the ends of its outputs."""
        ends = [
            runtime.run(["tail", "-c", str(KEPT_OUTPUT), path], {}) for path in (STDOUT, STDERR)
        ]
        stdout, stderr = [end.stdout for end in await asyncio.gather(*ends)]
        trace.info["program"] = {"exit_code": code, "stdout": stdout, "stderr": stderr}
        return stdout, stderr

    async def score(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Read the reward, if the program gives it. Raises ``HarnessError`` for what is none."""
        await super().score(trace, runtime)
        run = self.runs.get(trace.id)
        if run is None:
            return
        if self.config.reward == "taskset":
            if trace.task.type == "ProgramTask":
                raise HarnessError(
                    "harness program: the taskset 'program' scores nothing. Set the harness's "
                    "reward to 'stdout' or 'file', or use a taskset with a reward."
                )
            return

        try:
            run.terms = terms_of(await self.given_reward(run, runtime))
        except (ValueError, OSError, vf.SandboxError) as error:
            if trace.stop_condition not in (None, "agent_completed"):
                run.terms = terms_of("0")  # it was stopped before it could score itself
                return
            raise HarnessError(f"harness program: no reward in {self.origin}: {error}") from error

    @property
    def origin(self) -> str:
        is_file = self.config.reward == "file"
        return f"the file {self.config.reward_file}" if is_file else "the last line of its output"

    async def given_reward(self, run: Run, runtime: vf.Runtime) -> str:
        if self.config.reward == "stdout":
            return last_line(run.output)
        content: bytes = await runtime.read(self.config.reward_file, max_bytes=MOST_REWARD)
        return content.decode("utf-8", "replace").strip()

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """After scoring, however the rollout ended: close the record."""
        run = self.runs.pop(trace.id, None)
        if run is None:
            return
        run.close()
        if run.terms is not None:
            for name, own in trace.rewards.items():
                trace.rewards[name] = own and Reward(score=own.score, weight=0.0)
            for name, value in run.terms.items():
                trace.record_reward(name, value)

        if "program" not in trace.info:  # it was still running
            await self.record(trace, runtime, -1)
        record = trace.info["program"]
        if run.models:
            record["models"] = {name: model.record for name, model in run.models.items()}
        if run.policy is not None:
            record["ignored"] = sorted(run.policy.ignored)
            versions = run.policy.weight_versions()
            if versions:
                trace.info["weight_versions"] = versions
