//! Records a trace.

use super::form::{Pass, Trace, VERSION};
use super::packed;
use super::tables::Tables;
use crate::compilation::Observer;
use frit_ir::Graph;

/// Records the graphs of a compilation, and shows them to another observer.
pub struct Recorder<'a> {
    observer: &'a mut dyn Observer,
    /// Whether the other one observes the passes that run now.
    shows: bool,
    recording: Option<Recording>,
}

struct Recording {
    tables: Tables,
    imported: String,
    before: Graph,
    passes: Vec<Pass>,
    /// Those of the evaluation beside a training, once they begin.
    evaluation: Option<Vec<Pass>>,
}

impl<'a> Recorder<'a> {
    /// Shows everything to this observer.
    pub fn new(observer: &'a mut dyn Observer) -> Self {
        Recorder { observer, shows: false, recording: None }
    }

    /// The file of the trace; empty if no pass began.
    pub fn finish(self) -> Vec<u8> {
        let Some(Recording { tables, imported, passes, evaluation, .. }) = self.recording else {
            return vec![];
        };
        let strings = tables.strings.all.iter().skip(tables.imported_strings);
        packed(&Trace {
            version: VERSION,
            imported,
            strings: strings.map(|text| text.to_string()).collect(),
            origins: tables.new_origins,
            operations: tables.new_operations,
            passes,
            evaluation: evaluation.unwrap_or_default(),
        })
    }
}

impl Observer for Recorder<'_> {
    fn begin(&mut self, evaluation: bool, graph: &Graph) -> bool {
        self.shows = self.observer.begin(evaluation, graph);
        match &mut self.recording {
            Some(recording) => {
                recording.before = graph.clone();
                recording.evaluation = Some(vec![]);
            }
            None => {
                let (tables, _, imported) = Tables::of_imported(graph);
                let before = graph.clone();
                let (passes, evaluation) = (vec![], None);
                self.recording = Some(Recording { tables, imported, before, passes, evaluation });
            }
        }
        true
    }

    fn after(&mut self, index: usize, name: &str, graph: &Graph) {
        let recording = self.recording.as_mut().expect("invariant: passes begin");
        let changed = recording.before != *graph;
        let edit = changed.then(|| recording.tables.edit(&recording.before, graph));
        if changed {
            recording.before = graph.clone();
        }
        let passes = recording.evaluation.as_mut().unwrap_or(&mut recording.passes);
        passes.push(Pass { pass: name.into(), graph: edit });
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
