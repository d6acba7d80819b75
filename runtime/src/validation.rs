//! Validation between training steps: loss and metrics over examples that are not trained on.
//!
//! The evaluation plan runs on a separate device with a copy of the parameters that each rank owns; batches and means
//! are those of `frit eval`.

use crate::RunError;
use crate::data::Source;
use crate::device::Device;
use crate::eval::{self, Feed};
use crate::initialize::initialize;
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use frit_ir::plan::{EvalSpec, Held, ParamId, Plan};
use std::collections::{BTreeMap, HashMap};

/// Validation options of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationOptions {
    /// The examples.
    pub data: Source,
    /// Steps between validations; by default those between checkpoints. There is also one after the last step.
    pub every: Option<usize>,
}

/// The result of a validation.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The weighted sum of the losses.
    pub loss: f64,
    /// Each loss, by name.
    pub losses: BTreeMap<String, f64>,
    /// The metrics, by name.
    pub metrics: BTreeMap<String, f64>,
}

/// The evaluation of a plan, and its examples.
pub struct Validation {
    /// The evaluation plan.
    pub dir: PlanDir,
    /// Parameters that each rank copies from the training plan.
    copies: Vec<Vec<Copy>>,
    feed: Feed,
    batches: usize,
}

impl Validation {
    /// Opens the evaluation of a plan directory and the examples.
    ///
    /// # Errors
    /// If the plan has no evaluation or no loss, the evaluation stores parameters differently, or the examples do not
    /// fit.
    pub fn open(training: &PlanDir, data: &Source) -> Result<Validation, RunError> {
        let dir = PlanDir::load_evaluation(&training.path)?;
        let copies = (0..training.plan.world_size)
            .map(|rank| copies(&training.plan, &dir.plan, rank))
            .collect::<Result<_, _>>()?;
        let examples = eval::examples(data, &dir.plan, spec(&dir.plan))?;
        let batches = examples.batches();
        Ok(Validation { dir, copies, feed: Feed::Examples(examples), batches })
    }

    /// Writes the initial values of a device of this plan; [`Validation::measure`] copies the parameters of the
    /// training plan.
    ///
    /// # Errors
    /// If the device failed.
    pub fn initialize(&self, device: &mut impl Device, rank: usize) -> Result<(), RunError> {
        initialize(&self.dir, &[], &Tensors::new(), device, rank)
    }

    /// Evaluates the current parameters of `trained`; the result is equal on every rank. All ranks must call it.
    ///
    /// # Errors
    /// If a device or another rank failed.
    pub fn measure(
        &self,
        trained: &impl Device,
        device: &mut impl Device,
        rank: usize,
    ) -> Result<Measured, RunError> {
        for copy in &self.copies[rank] {
            let bytes = trained.read(copy.from.buffer, copy.from.offset, copy.from.bytes)?;
            device.write(copy.to.buffer, copy.to.offset, &bytes)?;
        }
        let eval = spec(&self.dir.plan);
        let all = eval::sums(
            &self.dir.plan,
            eval,
            &self.feed,
            rank,
            device,
            self.batches,
            |_, _| Ok(()),
        )?;
        let loss = eval.loss(&all);
        Ok(Measured { loss, losses: eval.losses(&all), metrics: eval.metrics(&all) })
    }
}

fn spec(plan: &Plan) -> &EvalSpec {
    plan.eval.as_ref().expect("invariant: an evaluation was loaded")
}

/// A parameter, or a part of it, that a rank has in the training and the evaluation plan.
struct Copy {
    from: Held,
    to: Held,
}

/// The copies of a rank before an evaluation. Parameters that only the evaluation reads keep their initial values.
fn copies(training: &Plan, evaluation: &Plan, rank: usize) -> Result<Vec<Copy>, RunError> {
    let trained: HashMap<&str, ParamId> =
        training.params.iter_enumerated().map(|(i, p)| (p.name.as_str(), i)).collect();
    let mut copies = Vec::new();
    for (index, param) in evaluation.params.iter_enumerated() {
        let from = trained.get(param.name.as_str()).and_then(|other| training.held(*other, rank));
        let (Some(from), Some(to)) = (from, evaluation.held(index, rank)) else { continue };
        if (&from.elements, from.dtype) != (&to.elements, to.dtype) {
            return Err(RunError::Validation { parameter: param.name.clone() });
        }
        if to.bytes > 0 {
            copies.push(Copy { from, to });
        }
    }
    Ok(copies)
}
