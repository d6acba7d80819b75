//! Records the pass trace of a compilation beside another observer.

use super::Observer;
use crate::pass_trace::Recorder;
use frit_ir::Graph;

/// Records all passes, and shows them to another observer.
pub(super) struct Recorded<'a> {
    observer: &'a mut dyn Observer,
    /// Whether the other one observes the passes that run now.
    shows: bool,
    pub(super) recorder: Recorder,
}

impl<'a> Recorded<'a> {
    /// Shows everything to this observer.
    pub(super) fn beside(observer: &'a mut dyn Observer) -> Self {
        Recorded { observer, shows: false, recorder: Recorder::default() }
    }
}

impl Observer for Recorded<'_> {
    fn begin(&mut self, evaluation: bool, graph: &Graph) -> bool {
        self.shows = self.observer.begin(evaluation, graph);
        self.recorder.begin(graph);
        true
    }

    fn after(&mut self, index: usize, name: &str, graph: &Graph) {
        self.recorder.after(name, graph);
        if self.shows {
            self.observer.after(index, name, graph);
        }
    }

    fn stage(&mut self, what: &str) {
        self.observer.stage(what);
    }

    fn stops(&mut self) -> bool {
        self.observer.stops()
    }
}
