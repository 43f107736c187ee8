"""MLflow's client; its database under `PPOFLOW_HOME` is made beside its place and renamed.

MLflow's migrations are no transaction: killed within them it leaves a database that it never opens again.
"""

import os
from typing import TYPE_CHECKING

from rl_core.home import home
from rl_core.locks import locked
from tasks.environment import prepare

if TYPE_CHECKING:
    from mlflow import MlflowClient


def make_client() -> "MlflowClient":
    """Of the tracking server or database that the environment names.

    Raises:
        MlflowException: the database could not be made.
    """
    make_database()
    import mlflow

    return mlflow.MlflowClient()


def make_database() -> None:
    """Make the database if it is the one under `PPOFLOW_HOME` and is not there yet.

    Raises:
        MlflowException: it could not be made.
    """
    prepare()
    directory = home() / "mlflow"
    path = directory / "mlflow.db"
    import mlflow

    if path.exists() or mlflow.get_tracking_uri() != f"sqlite:///{path}":
        return
    from mlflow.exceptions import MlflowException
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy.exc import SQLAlchemyError

    partial = directory / ".mlflow.db.partial"
    with locked(directory / ".database.lock"):
        if path.exists():
            return
        try:
            for leaving in directory.glob(f"{partial.name}*"):  # its journal, too
                leaving.unlink()
            SqlAlchemyStore(f"sqlite:///{partial}", (directory / "artifacts").as_uri()).engine.dispose()
            os.rename(partial, path)
        except (SQLAlchemyError, OSError) as error:
            raise MlflowException(f"{path} could not be made: {error}") from error
