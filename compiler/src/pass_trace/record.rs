//! Records a trace.

use super::form::{Pass, Trace, VERSION};
use super::packed;
use super::tables::Tables;
use frit_ir::Graph;

/// Records the graphs of a compilation.
#[derive(Default)]
pub struct Recorder(Option<Recording>);

struct Recording {
    tables: Tables,
    imported: String,
    before: Graph,
    passes: Vec<Pass>,
    /// Those of the evaluation beside a training, once they begin.
    evaluation: Option<Vec<Pass>>,
}

impl Recorder {
    /// Passes begin on this graph: first those of the model, then those of its evaluation.
    pub fn begin(&mut self, graph: &Graph) {
        match &mut self.0 {
            Some(recording) => {
                recording.before = graph.clone();
                recording.evaluation = Some(vec![]);
            }
            None => {
                let (tables, _, imported) = Tables::of_imported(graph);
                let before = graph.clone();
                let (passes, evaluation) = (vec![], None);
                self.0 = Some(Recording { tables, imported, before, passes, evaluation });
            }
        }
    }

    /// A pass has made this graph.
    ///
    /// # Panics
    /// If none began.
    pub fn after(&mut self, pass: &str, graph: &Graph) {
        let recording = self.0.as_mut().expect("invariant: passes begin");
        let changed = recording.before != *graph;
        let edit = changed.then(|| recording.tables.edit(&recording.before, graph));
        if changed {
            recording.before = graph.clone();
        }
        let passes = recording.evaluation.as_mut().unwrap_or(&mut recording.passes);
        passes.push(Pass { pass: pass.into(), graph: edit });
    }

    /// The file of the trace; empty if no pass began.
    pub fn finish(self) -> Vec<u8> {
        let Some(Recording { tables, imported, passes, evaluation, .. }) = self.0 else {
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
