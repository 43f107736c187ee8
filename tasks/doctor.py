"""All that ppoflow needs of a machine: `rl_core.tools.doctor`'s checks, and those that only a flow needs – the batch system's
GPUs, Prefect, MLflow."""

import os
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from rl_core.config import Config, load_config
from rl_core.config.trainer import LaunchConfig
from rl_core.errors import ConfigError
from rl_core.home import writable
from rl_core.tools import doctor, doctor_devices
from rl_core.tools.doctor import Check, guarded, refused
from rl_core.tools.doctor_config import config_checks
from rl_core.tools.doctor_ranks import check_collective
from tasks.devices import NVIDIA, check_device, device_kind, gpu_count, rank_count, share_of_job
from tasks.environment import prepare
from tasks.mlflow_registry import RegistryError, registry, resolve_model_uri

SECONDS = 10.0
"""For a server to answer."""
JOB = {"SLURM_JOB_ID": "SLURM", "PBS_JOBID": "PBS"}


def examine(path: Path | None, overrides: Sequence[str], port: int) -> Iterator[Check]:
    """All checks, one after the other; each is given as soon as it is done.

    Args:
        path: a configuration, whose needs are looked at too.
        overrides: `key=value` on top of it.
        port: see `check_collective`.
    """
    yield guarded("python", doctor.check_python)
    yield guarded("packages", doctor.check_packages)
    store = guarded("store", doctor.check_home)
    yield store
    yield guarded("disk", doctor.check_disk)
    with tempfile.TemporaryDirectory() as elsewhere:
        if store.state == "fail":  # so that the others can be looked at
            os.environ["PPOFLOW_HOME"] = elsewhere
        prepare()
        yield guarded("batch system", check_batch_system)
        gpus = yield from _check_torch(port)
        yield guarded("prefect", check_prefect)
        yield guarded("mlflow", check_mlflow)
        if path is not None:
            yield from _check_config(path, overrides, gpus)


def _check_torch(port: int) -> Generator[Check, None, int]:
    """What can be said only with torch; returns the number of GPUs."""
    present = _gpus_of_job()
    yield guarded("host", lambda: doctor_devices.check_host(present))
    usable = guarded("torch", doctor.check_torch)
    yield usable
    if usable.state == "fail":
        yield from (Check(name, "skip", "needs torch") for name in ("gpus", "bfloat16", "gloo"))
        return present
    import torch

    seen: list[doctor_devices.Gpu] = []

    def look() -> Check:
        seen.extend(doctor_devices.gpus_of_torch())
        return doctor_devices.check_gpus(present, seen, torch.version.cuda)

    gpus = guarded("gpus", look)
    yield gpus
    if gpus.state == "fail":
        yield Check("bfloat16", "skip", "needs the GPUs")
    else:
        yield guarded("bfloat16", lambda: doctor_devices.check_bfloat16(seen))
    yield guarded("gloo", lambda: check_collective("gloo", 2, port))
    if seen and gpus.state != "fail":
        yield guarded("nccl", lambda: check_collective("nccl", min(2, len(seen)), 0))
    return len(seen)


def _gpus_of_job() -> int:
    try:
        return gpu_count()
    except ConfigError:  # the check of the batch system says it
        return 0


def _check_config(path: Path, overrides: Sequence[str], gpus: int) -> Iterator[Check]:
    try:
        config: Config = load_config(path, overrides)
    except ConfigError as error:
        yield refused("configuration", error, "Mend it; each key is documented under its field in rl_core/config/.")
        return
    yield Check("configuration", "pass", str(path))
    yield guarded("launch", lambda: check_launch(config.launch, gpus))
    name = config.model.name_or_path
    if name.startswith("models:"):
        yield guarded("model", lambda: Check("model", "pass", f"{name} is in {resolve_model_uri(name)}"))
    for what, check in config_checks(config):
        yield guarded(what, check)


def check_batch_system(environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA) -> Check:
    """The variables of SLURM or PBS lead to the GPUs that the job has.

    Raises:
        ConfigError: they do not; it says what to export.
    """
    job = next((f"{system} job {environment[name]}" for name, system in JOB.items() if environment.get(name)), None)
    gpus, share = gpu_count(environment, driver), share_of_job(environment)
    if "SLURM_PROCID" in environment:
        from rl_core.distributed import place

        place(environment)
    if share is not None and share.count and not gpus:
        found = f"{share.variable} gives {share.count} GPU(s) to this job, but the host shows none"
        return Check(
            "batch system", "fail", found, "Run nvidia-smi in the job; if it shows none either, tell the cluster's staff."
        )
    if job is None:
        return Check("batch system", "pass", "none")
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("PBS_NUM_NODES") or "1"
    return Check("batch system", "pass", f"{job} on {nodes} node(s), {gpus} GPU(s) for it on this one")


def check_launch(launch: LaunchConfig, gpus: int) -> Check:
    """The ranks have a GPU each, where they want one.

    Args:
        gpus: of this host.

    Raises:
        ConfigError: `launch.device` is cuda, and there is none.
    """
    check_device(launch)
    kind, ranks = device_kind(launch), rank_count(launch)
    if kind == "cuda" and 0 < gpus < ranks:
        remedy = f"Set launch.nproc_per_node to {gpus} or less, or take a host with more GPUs."
        return Check("launch", "fail", f"launch.nproc_per_node = {ranks}, but this host has {gpus} GPU(s)", remedy)
    return Check("launch", "pass", f"{ranks} rank(s) on this host, {kind}")


def check_prefect(seconds: float = SECONDS) -> Check:
    """The server that Prefect's settings name answers; without one each run brings its own."""
    import prefect
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    url = PREFECT_API_URL.value()
    if not url:
        return Check("prefect", "pass", f"{prefect.__version__}; no server is set, so each run brings its own")
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        client = get_client(sync_client=True, httpx_settings={"timeout": seconds})
        error = client.api_healthcheck()
    if error is not None:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "Start it (make servers, or prefect server start), mend PREFECT_API_URL, or unset it: a run then brings its own."
        return Check("prefect", "fail", f"the server at {url} does not answer ({reason})", remedy)
    return Check("prefect", "pass", f"{prefect.__version__}; the server at {url} answers")


def check_mlflow(uri: str | None = None) -> Check:
    """The tracking store answers, or can be made.

    Args:
        uri: default: MLFLOW_TRACKING_URI, which `tasks.environment.prepare` has set.

    Raises:
        StoreError: its directory cannot be written.
    """
    uri = uri or os.environ["MLFLOW_TRACKING_URI"]
    if uri.startswith("sqlite:///"):
        return _check_sqlite(Path(uri.removeprefix("sqlite:///")))
    try:
        with registry("list its models") as client:
            client.search_registered_models(max_results=1)
    except RegistryError as error:
        check = refused("mlflow", error)
        remedy = "Start it (make servers), mend MLFLOW_TRACKING_URI, or unset it: MLflow then works on a file in PPOFLOW_HOME."
        return Check("mlflow", "fail", check.found, remedy)
    return Check("mlflow", "pass", f"{_plain(uri)} answers")


def _check_sqlite(path: Path) -> Check:
    import sqlite3

    if not path.exists():
        writable(path.parent)
        return Check("mlflow", "pass", f"{path} is made by the first run")
    try:
        database = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=SECONDS)
        try:
            database.execute("BEGIN IMMEDIATE")  # as a writer
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            database.rollback()
        finally:
            database.close()
    except sqlite3.Error as error:
        remedy = (
            "See that no other process holds it and that it is yours; a damaged one, set aside, is made anew by the next run."
        )
        return Check("mlflow", "fail", f"{path} cannot be used ({error})", remedy)
    return Check("mlflow", "pass", f"{path} is in order")


def _plain(uri: str) -> str:
    """Without the password in it."""
    scheme, separator, rest = uri.partition("://")
    return scheme + separator + rest.rpartition("@")[2]
