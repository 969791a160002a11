"""Which tasks a step takes."""

from lopd_fast.envs.base import Task
from lopd_fast.task_order import spread_groups, tasks_of_step


def test_every_pass_over_the_tasks_has_each_once_in_an_order_of_its_own() -> None:
    tasks = [Task(str(number), "x", "") for number in range(5)]
    order = [task.id for step in range(5) for task in tasks_of_step(tasks, step, 2, seed=0)]
    assert sorted(order[:5]) == sorted(order[5:]) == sorted(task.id for task in tasks)
    assert order[:5] != order[5:]
    assert order != [task.id for step in range(5) for task in tasks_of_step(tasks, step, 2, seed=1)]


def test_steps_hold_the_groups_as_all_the_tasks_do() -> None:
    """Two of group a to one of b in the whole, and so in every three; which, and in which order, is random."""
    tasks = [Task(str(number), "x", "b" if number % 3 == 0 else "a") for number in range(18)]
    orders = [spread_groups(tasks, seed) for seed in range(20)]
    for order in orders:
        assert sorted(task.id for task in order) == sorted(task.id for task in tasks)
        for start in range(0, 18, 3):
            assert [task.group for task in order[start : start + 3]].count("a") == 2
    assert len({order[0].id for order in orders}) > 5 and orders[3] == spread_groups(tasks, 3)
    alone = [Task(str(number), "x", "a") for number in range(18)]
    assert len({spread_groups(alone, seed)[0].id for seed in range(20)}) > 5
