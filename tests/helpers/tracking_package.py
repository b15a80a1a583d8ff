"""A stand-in for the package of a tracker."""


class StandIn:
    """Records what a tracker is asked to do; `trouble` is raised when a run is begun."""

    def __init__(self, trouble=None):
        self.started, self.logged, self.finished, self.trouble = None, [], False, trouble

    def init(self, **arguments):
        if self.trouble:
            raise self.trouble
        self.started = arguments
        return self  # as its run

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True
