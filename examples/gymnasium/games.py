"""Games of others as Gymnasium environments: TextArena (`pip install textarena`) and TextWorld
(`pip install textworld`; `tw-make tw-simple --rewards dense --goal detailed --output
game.z8` makes a game). Ids: "games:Arena-v0" and "games:World-v0", with this folder in PYTHONPATH.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text

TEXT = Text(10_000, min_length=0, charset=string.printable)


class Arena(gymnasium.Env[str, str]):
    """A game of TextArena for one player, such as GuessTheNumber-v0-raw."""

    observation_space = action_space = TEXT

    def __init__(self, name: str) -> None:
        import textarena

        self.game = textarena.make(name)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.game.reset(num_players=1, seed=seed)
        return self._read(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, _ = self.game.step(action=action)
        if done:
            return "", float(self.game.close()[0][0]), True, False, {}
        return self._read(), 0.0, False, False, {}

    def _read(self) -> str:
        return "\n".join(text for _, text, _ in self.game.get_observation()[1])


class World(gymnasium.Env[str, str]):
    """A game file of TextWorld; the reward is the gain of its score, 1 in all."""

    observation_space = action_space = TEXT

    def __init__(self, path: str) -> None:
        import textworld

        self.infos = textworld.EnvInfos(score=True, max_score=True, won=True, lost=True)
        self.game = textworld.start(path, self.infos)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.score, state = 0.0, self.game.reset()
        return state.feedback, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        state, score, done = self.game.step(action)
        gained, self.score = (score - self.score) / state.max_score, score
        return state.feedback, gained, done, False, {}


gymnasium.register("Arena-v0", Arena)
gymnasium.register("World-v0", World)
