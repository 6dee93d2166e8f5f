"""Load the teacher that a recipe names, and check that it can teach the student."""

from train.loop.class_names import match_outputs
from train.loop.init_from import load_weights
from train.loop.teacher import Teacher
from train.recipes import Recipe, Task
from vit_spec import InputError


def load_teacher(recipe: Recipe, task: Task, names: tuple[str, ...], in_channels: int) -> Teacher | None:
    """Load the teacher that a recipe names; None if it names none.

    Args:
        recipe: see its fields about distillation.
        task: what the student learns.
        names: names of the classes of the data.
        in_channels: input channels of the student.

    Raises:
        InputError: there is nothing to load, or the teacher does not predict the classes of the data from such images.
    """
    if recipe.teacher is None:
        return None
    if task != "classes":
        raise InputError(f"--teacher is for classes, and the task is {task}: leave it out")
    try:
        name, checkpoint, notes = load_weights(recipe.teacher, recipe.teacher_set, "--teacher-set")
    except InputError as error:
        raise type(error)(f"the teacher cannot be loaded, {error}; --teacher WEIGHTS says where it is") from None
    config, flag = checkpoint.config, f"--teacher {recipe.teacher}"
    if not config.num_classes or config.head.pool == "none" or checkpoint.task != "classes":
        what = checkpoint.task if config.num_classes else "features"
        raise InputError(f"{flag} gives {what} and no classes: give the weights of a classifier")
    if (in_channels, config.in_channels) not in ((1, 1), (3, 3), (1, 3)):
        raise InputError(
            f"{flag} takes images of {config.in_channels} channels, and the student of {in_channels}: give a teacher of "
            f"{in_channels}, or another --model.in-channels"
        )
    try:
        columns = match_outputs("the teacher", checkpoint.labels, config.num_classes, task, names)
    except InputError as error:
        raise InputError(f"{flag}: {error}: give a teacher of these classes") from None
    if checkpoint.labels is None:
        notes.append("the teacher has no names of classes: its outputs are those of the data, in its order")
    return Teacher(name, checkpoint, columns, [f"teacher: {note}" for note in notes])
