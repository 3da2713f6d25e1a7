"""The server's configuration as a step sees it: the run file's, with what the tune step found."""

from eyas.config import Server
from eyas.files import read_json
from eyas.spec import StepSpec


def config_of(spec: StepSpec) -> Server:
    """The run file's `server`; where the step reads `tune`, with the winner's flags and environment over it."""
    config = spec.section(Server)
    if "tune" not in spec.inputs:
        return config
    winner = read_json(spec.inputs["tune"] / "result.json")["winner"]
    return config.model_copy(update={"args": {**config.args, **winner["args"]}, "env": {**config.env, **winner["env"]}})
