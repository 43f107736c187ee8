"""`ppoflow verify`."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rl_core.errors import EXIT_USER

if TYPE_CHECKING:
    from tasks.store_verify import Checked


def verify(*what: str, as_json: Annotated[bool, Parameter("--json", negative=())] = False) -> None:
    """Read every byte of stored files again and compare it with what was written.

    For models:/name@champion (or models:/name/3) that proves that the registered files are those that training wrote: they are
    compared with the version's digest, the policy in the store, the run's export and checkpoint, and the policy's inputs and
    comparison, as far as these are under PPOFLOW_HOME. Exit code 0 if all is whole; 2 if something is damaged, with its files.

    Parameters
    ----------
    what
        Directories, beginnings of keys, or models:/name@alias; the whole store and all trainings if left out.
    as_json
        Print one JSON document instead.
    """
    import json
    from dataclasses import asdict

    from tasks.store_verify import verify as check

    checked = []
    for one in check(what):
        checked.append(one)
        if not as_json:
            _print(one)
    damaged = [one for one in checked if one.damage]
    conclusion = _conclusion(checked, damaged, [one for one in what if one.startswith("models:")])
    if as_json:
        whole = {"whole": not damaged, "conclusion": conclusion, "checked": [asdict(one) for one in checked]}
        print(json.dumps(whole, indent=1))
    else:
        print(conclusion)
    if damaged:
        raise SystemExit(EXIT_USER)


def _print(one: "Checked") -> None:
    if one.absent:
        print(f"absent   {one.what:<34} {one.absent}")
        return
    print(
        f"{'DAMAGED' if one.damage else 'whole':<8} {one.what:<34} {one.files:>4} files {one.bytes / 1e6:>10.1f} MB  {one.path}"
    )
    for sentence in one.damage:
        print(f"           {sentence}")


def _conclusion(checked: "list[Checked]", damaged: "list[Checked]", models: list[str]) -> str:
    if damaged:
        return f"{len(damaged)} of {len(checked)} damaged: {', '.join(one.what for one in damaged)}"
    read = f"{len([one for one in checked if not one.absent])} directories are whole"
    if not models:
        return read
    absent = [one.what for one in checked if one.absent]
    if any(one.startswith("train_policy") for one in absent):
        return f"{read}; {models[0]} is what was registered, but the policy that training wrote is not here to compare it with"
    return f"{read}; {' and '.join(models)}: the registered files are those that training wrote"
