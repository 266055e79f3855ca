"""Shared by the privacy tests: a known key, and a recorder of received updates."""

from lightning_fed.privacy import CentralDP
from tests.recorders import Recorder

KEY = 0x0123456789ABCDEF0123456789ABCDEF


class KnownKey(CentralDP):
    """Central differential privacy with a known key, and optionally other noise for the count."""

    def __init__(self, clip, delta, noise_multiplier=None, key=KEY, count_noise=0.05, **options):
        super().__init__(clip, delta, noise_multiplier, **options)
        self.known_key, self.count_noise = key, count_noise

    def draw_key(self):
        return self.known_key


class WireRecorder(Recorder):
    """Records the updates received by the server, after the update steps on the client.

    Sends no data.
    """

    keeps_privacy = True

    def on_server_receive(self, trainer, module, update):
        super().on_server_receive(trainer, module, update)
        for visit in self.round(trainer.current_epoch):  # empty on a server without clients
            if visit.client == update.client:
                visit.update = {name: value.cpu().clone() for name, value in update.state.items()}
                visit.num_samples, visit.extras = update.num_samples, tuple(update.extras)
