//! Validation between training steps: loss and metrics over examples that are not trained on.
//!
//! The evaluation plan runs on a separate device with a copy of the parameters that each rank owns; batches and means
//! are those of `frit eval`. The examples are those of files, or batches that the caller gives.

use crate::RunError;
use crate::device::Device;
use crate::eval::{self, Feed, Sums};
use crate::initialize::initialize;
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use frit_data::Source;
use frit_ir::plan::{EvalSpec, Held, ParamId, Plan};
use std::collections::{BTreeMap, HashMap};

/// Validation options of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationOptions {
    /// The examples; without files, those that the plan names.
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

/// The evaluation of a training plan.
pub struct Validation {
    /// The evaluation plan.
    pub dir: PlanDir,
    /// Parameters that each rank copies from the training plan.
    copies: Vec<Vec<Copy>>,
}

/// The examples of a validation.
pub struct Examples(pub(crate) Feed);

impl Validation {
    /// Opens the evaluation of a plan directory.
    ///
    /// # Errors
    /// If the plan has no evaluation or no loss, or the evaluation stores parameters differently.
    pub fn open(training: &PlanDir) -> Result<Validation, RunError> {
        let dir = PlanDir::load_evaluation(&training.path)?;
        let copies = (0..training.plan.world_size)
            .map(|rank| copies(&training.plan, &dir.plan, rank))
            .collect::<Result<_, _>>()?;
        Ok(Validation { dir, copies })
    }

    /// The examples of files.
    ///
    /// # Errors
    /// If they do not fit the evaluation.
    pub fn examples(&self, data: &Source) -> Result<Examples, RunError> {
        let examples = eval::examples(data, &self.dir.plan, spec(&self.dir.plan))?;
        Ok(Examples(Feed::Examples(examples)))
    }

    /// Writes the initial values of a device of this plan; [`Validation::measure`] copies the parameters of the
    /// training plan.
    ///
    /// # Errors
    /// If the device failed.
    pub fn initialize(&self, device: &mut impl Device, rank: usize) -> Result<(), RunError> {
        initialize(&self.dir, &[], &Tensors::new(), device, rank)
    }

    /// Evaluates the current parameters of `trained` on all examples; the result is equal on every rank. All ranks
    /// must call it.
    ///
    /// # Errors
    /// If a device or another rank failed.
    pub fn measure(
        &self,
        trained: &impl Device,
        device: &mut impl Device,
        rank: usize,
        examples: &Examples,
    ) -> Result<Measured, RunError> {
        self.copy(trained, device, rank)?;
        let eval = spec(&self.dir.plan);
        let mut sums = Sums::none(eval);
        self.add(&mut sums, examples, device, rank)?;
        let all = &sums.totals;
        Ok(Measured { loss: eval.loss(all), losses: eval.losses(all), metrics: eval.metrics(all) })
    }

    /// Copies the current parameters of `trained`.
    ///
    /// # Errors
    /// If a device failed.
    pub(crate) fn copy(
        &self,
        trained: &impl Device,
        device: &mut impl Device,
        rank: usize,
    ) -> Result<(), RunError> {
        for copy in &self.copies[rank] {
            let bytes = trained.read(copy.from.buffer, copy.from.offset, copy.from.bytes)?;
            device.write(copy.to.buffer, copy.to.offset, &bytes)?;
        }
        Ok(())
    }

    /// Adds the losses and metrics of examples to `sums`. All ranks must call it.
    ///
    /// # Errors
    /// If the device or another rank failed.
    pub(crate) fn add(
        &self,
        sums: &mut Sums,
        examples: &Examples,
        device: &mut impl Device,
        rank: usize,
    ) -> Result<(), RunError> {
        let plan = &self.dir.plan;
        eval::add(sums, plan, spec(plan), &examples.0, rank, device, |_, _| Ok(()))
    }
}

/// The losses and metrics of an evaluation plan.
pub(crate) fn spec(plan: &Plan) -> &EvalSpec {
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
