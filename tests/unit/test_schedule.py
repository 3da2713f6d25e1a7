"""What the schedule does in the cases that it is there for."""

from eyas.plan import schedule
from eyas.plan.schedule import Problem, State, Task
from eyas.plan.simulate import best_order, critical, one_after_another, simulate

GPU = {"gpu": 1.0}


def task(name: str, seconds: float, needs: str = "", lease: str = "", **more: object) -> Task:
    return Task(name, seconds, frozenset(needs.split()), leases=frozenset(lease.split()), **more)  # type: ignore[arg-type]


def test_a_server_loads_while_the_data_are_prepared() -> None:
    steps = [task("corpus", 500), task("answers", 60, "corpus", "server")]
    problem = Problem({one.name: one for one in steps}, {"server": task("server", 540, takes=GPU)})
    run = simulate(problem, best_order(problem))
    assert run.loads[0][1].start == 0
    assert run.seconds == 600
    assert one_after_another(problem) == 1100
    assert critical(problem, run) == ["load server", "answers"]


def test_two_servers_are_never_on_one_device() -> None:
    """The second loads as soon as what it serves is there and the first one has gone."""
    steps = [
        task("capture", 10, lease="server"),
        task("train", 20, "capture", takes=GPU),
        task("bench", 10, "train", "drafted"),
    ]
    services = {"server": task("server", 5, takes=GPU), "drafted": task("drafted", 5, "train", takes=GPU)}
    run = simulate(
        Problem({one.name: one for one in steps}, services),
        Problem({one.name: one for one in steps}, services).remaining,
    )
    assert [(name, span.start) for name, span in run.loads] == [("server", 0), ("drafted", 35)]
    assert run.ended[0][1].end == 15
    assert run.seconds == 50


def test_the_longest_remaining_path_comes_first() -> None:
    steps = [task("short", 5, takes=GPU), task("long", 5, takes=GPU), task("after", 100, "long")]
    problem = Problem({one.name: one for one in steps})
    assert schedule.startable(problem, State(), problem.remaining) == (["long"], [])


def test_amounts_of_a_resource_add_up() -> None:
    steps = [task(name, 1, takes={"cores": 3.0}) for name in "abc"]
    problem = Problem({one.name: one for one in steps}, capacity={"cores": 8})
    assert len(schedule.startable(problem, State(), problem.remaining)[0]) == 2


def test_another_order_is_taken_where_the_longest_path_first_is_slow() -> None:
    """A device that is held for a server whose step waits for something else is lost to the others."""
    steps = [
        task("fetch", 100),
        task("answers", 20, "fetch", "server"),
        task("other", 15, takes=GPU),
    ]
    problem = Problem({one.name: one for one in steps}, {"server": task("server", 10, takes=GPU)})
    assert simulate(problem, problem.remaining).seconds == 135
    assert simulate(problem, best_order(problem)).seconds == 120
