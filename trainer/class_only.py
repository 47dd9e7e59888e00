"""A class method that is called on the class alone: on an instance it would leave that instance as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):
        """A class method that raises when an instance calls it."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return super().__get__(None, owner)
            return lambda *args, **kwargs: _refuse(self.__func__.__name__, type(instance).__name__)


def _refuse(method: str, cls: str) -> NoReturn:
    raise ConfigurationError(
        f"{method} returns a new {cls} and leaves this one as it is: call it on the class, module = {cls}.{method}(…)."
    )
