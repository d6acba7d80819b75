//! Validation: the loss over examples that are not trained on, between steps of training.
//!
//! The plan's evaluation runs on a device of its own beside the one that trains, with a copy of what each
//! rank owns of the parameters; its batches and its mean are those of `frit eval`.

use crate::RunError;
use crate::comm::Communicator;
use crate::device::Device;
use crate::device::cpu::Cpu;
use crate::device::cuda::Cuda;
use crate::device::cuda::driver::Driver;
use crate::eval::{self, Feed};
use crate::initialize::initialize;
use crate::plan_dir::PlanDir;
use crate::save::Tensors;
use frit_ir::plan::{EvalSpec, ParamHome, Plan};
use std::path::Path;

/// What is asked of a run about validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationOptions {
    /// The examples.
    pub data: std::path::PathBuf,
    /// Steps between two validations; by default those between two checkpoints. There is one after the last
    /// step too.
    pub every: Option<usize>,
}

/// The evaluation of a plan, and what it is evaluated on.
pub struct Validation {
    pub(crate) dir: PlanDir,
    feed: Feed,
    batches: usize,
}

impl Validation {
    /// Opens the evaluation of a plan directory and the examples.
    ///
    /// # Errors
    /// If the plan has no evaluation or no loss, or the examples are not right for it.
    pub fn open(plan: &Path, data: &Path) -> Result<Validation, RunError> {
        let dir = PlanDir::load_evaluation(plan)?;
        let examples = eval::examples(data, &dir.plan, spec(&dir.plan))?;
        let batches = examples.batches();
        Ok(Validation { dir, feed: Feed::Examples(examples), batches })
    }

    /// One rank's CPU, with everything but the parameters of the training.
    ///
    /// # Errors
    /// If the device cannot be made.
    pub(crate) fn on_cpu<C: Communicator>(
        &self,
        comm: C,
        threads: usize,
        interpret: bool,
    ) -> Result<Cpu<'_, C>, RunError> {
        let rank = comm.rank();
        let mut device = Cpu::new(&self.dir, comm, threads, interpret)?;
        initialize(&self.dir, &[], &Tensors::new(), &mut device, rank)?;
        Ok(device)
    }

    /// The same on the GPU that trains. All ranks must ask.
    ///
    /// # Errors
    /// If the evaluation cannot be made ready there.
    pub fn on_gpu<D: Driver>(&self, trained: &Cuda<'_, D>) -> Result<Cuda<'_, D>, RunError> {
        let mut device = trained.beside(&self.dir)?;
        initialize(&self.dir, &[], &Tensors::new(), &mut device, trained.rank())?;
        Ok(device)
    }

    /// The mean loss with the parameters that `trained` holds now, the same on every rank. All ranks must
    /// ask.
    ///
    /// # Errors
    /// If a device or another rank failed.
    pub fn loss(
        &self,
        plan: &Plan,
        trained: &impl Device,
        device: &mut impl Device,
        rank: usize,
    ) -> Result<f64, RunError> {
        self.copy_parameters(plan, trained, device, rank)?;
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
        Ok(eval.loss(&all))
    }

    /// Copies what `rank` owns.
    fn copy_parameters(
        &self,
        plan: &Plan,
        trained: &impl Device,
        device: &mut impl Device,
        rank: usize,
    ) -> Result<(), RunError> {
        let own = &self.dir.plan;
        for group in &own.groups {
            for segment in &group.segments {
                let Some((begin, to, len)) = group.owned(segment, rank) else { continue };
                let name = &own.params[segment.param].name;
                if self.dir.only_evaluated(name) {
                    continue;
                }
                let bytes = read(plan, trained, rank, name, (begin, len))?;
                device.write(group.master, to * 4, &bytes)?;
            }
        }
        for param in &own.params {
            let ParamHome::Buffer(buffer) = param.home else { continue };
            if !self.dir.only_evaluated(&param.name) {
                let whole = (0, param.ty.shape.numel());
                device.write(buffer, 0, &read(plan, trained, rank, &param.name, whole)?)?;
            }
        }
        Ok(())
    }
}

fn spec(plan: &Plan) -> &EvalSpec {
    plan.eval.as_ref().expect("invariant: an evaluation was loaded")
}

/// Elements of a parameter as the training holds them on this rank.
fn read(
    plan: &Plan,
    device: &impl Device,
    rank: usize,
    name: &str,
    (begin, len): (usize, usize),
) -> Result<Vec<u8>, RunError> {
    let apart = || RunError::Validation { parameter: name.into() };
    let index = plan.params.iter().position(|p| p.name == name).ok_or_else(apart)?;
    let size = plan.params[index].ty.dtype.size();
    match plan.params[index].home {
        ParamHome::Buffer(buffer) => device.read(buffer, begin * size, len * size),
        ParamHome::Group { group, .. } => {
            let group = &plan.groups[group];
            let segment = group.segments.iter().find(|s| s.param == index).ok_or_else(apart)?;
            let (first, from, owned) = group.owned(segment, rank).ok_or_else(apart)?;
            if begin < first || begin + len > first + owned {
                return Err(apart());
            }
            device.read(group.master, (from + begin - first) * 4, len * 4)
        }
        ParamHome::Unused => Err(apart()),
    }
}
