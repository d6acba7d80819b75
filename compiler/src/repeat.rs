//! What it takes to compile the model of a plan again, and to run the plan without data.

use crate::compilation::Request;
use crate::config::Config;
use crate::diagnostics::Report;
use crate::export::{self, Trained};
use crate::source::Origin;
use frit_ir::plan::{InputSpec, Plan, layout};
use frit_ir::{Code, Diagnostic, Tensor};
use frit_runtime::safetensors_dtype;
use safetensors::tensor::TensorView;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The compilation of a plan.
pub(crate) struct Repeat {
    /// Its configuration.
    pub(crate) config: Config,
    /// Its request, for the model where it is now.
    pub(crate) request: Request,
    /// The digest of the model's file; `None` if it was written anew from what the plan has kept of it.
    pub(crate) digest: Option<String>,
}

impl Repeat {
    /// From a plan directory. If the model is neither where it was nor `given`, it is written beside `to` from the copy in the plan.
    ///
    /// # Errors
    /// If the model cannot be found any more.
    pub(crate) fn of(
        dir: &Path,
        plan: &Plan,
        given: Option<&Path>,
        to: &Path,
        allow_external_data: bool,
    ) -> Result<Repeat, Report> {
        let config = Config::parse(&plan.config, "source/train.toml", &[])?;
        let source = dir.join(layout::SOURCE);
        let origin = Origin::read(&source)?;
        let (model, digest) = match origin.model(&source, given) {
            Err(gone) if given.is_none() => {
                let model = to.with_extension("onnx");
                // The missing original is a clearer error than why the plan cannot replace it.
                from_plan(dir, &model).map_err(|_| gone)?;
                (model, None)
            }
            model => (model?, Some(origin.sha256)),
        };
        let allow_external_data = allow_external_data || origin.allow_external_data;
        let request =
            Request { model, binds: origin.binds, allow_external_data, ..Request::default() };
        Ok(Repeat { config, request, digest })
    }
}

/// Writes the model of a plan from its stored source and weights.
fn from_plan(dir: &Path, model: &Path) -> Result<(), Report> {
    let weights = Trained::of_plan(dir, &dir.join(layout::WEIGHTS))?;
    let options = export::Options { training: true, ..export::Options::default() };
    export::onnx(&weights, &options, model).map(|_| ())
}

/// One global batch of random numbers: floats between −1 and 1, integers within the range that they index.
pub(crate) fn random_data(plan: &Plan, dir: &Path) -> Result<PathBuf, Report> {
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut next = move || random.f64();
    let batches = plan.world_size * plan.accumulation;
    let mut tensors = Vec::new();
    for input in &plan.inputs {
        let mut ty = input.ty.clone();
        if input.per_example {
            match plan.batch() {
                Some(_) => ty.shape.0[0] *= batches,
                None => ty.shape.0.insert(0, batches),
            }
        }
        let n = ty.shape.numel();
        let tensor = if ty.dtype.is_float() {
            let values = (0..n).map(|_| 2.0 * next() - 1.0).collect();
            Tensor::floats(ty.dtype, ty.shape.clone(), values)
        } else {
            // What indexes nothing is most often a mask: ones.
            let values = match indexed(input) {
                Some(all) => {
                    let size = (all.end - all.start) as f64;
                    (0..n).map(|_| all.start + (next() * size) as i64).collect()
                }
                None => vec![1; n],
            };
            Tensor::ints(ty.dtype, ty.shape.clone(), values)
        };
        tensors.push((input.name.clone(), ty, tensor.to_bytes()));
    }
    let refuse = |e: safetensors::SafeTensorError| -> Report {
        Diagnostic::error(Code::FileUnwritable, format!("cannot write random data: {e}")).into()
    };
    let mut views = Vec::new();
    for (name, ty, bytes) in &tensors {
        let dtype = safetensors_dtype(ty.dtype);
        views.push((name, TensorView::new(dtype, ty.shape.0.clone(), bytes).map_err(refuse)?));
    }
    let path = dir.join("data.safetensors");
    safetensors::serialize_to_file(views, None, &path).map_err(refuse)?;
    Ok(path)
}

/// The indices from 0 on that every reader of an input takes; `None` if nothing reads it as indices.
fn indexed(input: &InputSpec) -> Option<Range<i64>> {
    let first = input.ranges.iter().map(|r| r.lo.max(0)).max()?;
    let last = input.ranges.iter().map(|r| r.hi).min()?;
    Some(first..last + 1)
}
