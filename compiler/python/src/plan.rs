//! Plans: what a plan directory holds, as text, HTML and JSON.

use crate::error;
use frit::commands::inspect::{self, View};
use frit::commands::{diff, report, verify};
use frit::diagnostics::Report;
use frit::report::Certified;
use frit::{clusters, plan_dir, predict};
use frit_ir::plan::{InputSpec, layout};
use frit_passes::simulate::simulate;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The plan of a plan directory. JSON is text, which the package reads.
#[pyclass(frozen, module = "frit._frit")]
pub(crate) struct Plan {
    path: PathBuf,
    plan: frit_ir::plan::Plan,
}

#[pymethods]
impl Plan {
    /// Reads and checks the plan of a directory.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Plan> {
        let plan = refused(py, py.detach(|| plan_dir::read(&path)))?;
        Ok(Plan { path, plan })
    }

    /// The directory.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// The summary of `frit compile`.
    fn summary(&self) -> String {
        inspect::summary(&self.plan)
    }

    /// Name, ranks, examples of a step, inputs, those that only the evaluation has, and parameters as JSON.
    fn facts(&self) -> String {
        let plan = &self.plan;
        let input = |i: &InputSpec| {
            json!({"name": i.name, "dtype": i.ty.dtype, "shape": i.ty.shape.dims(),
                   "per_example": i.per_example})
        };
        let inputs: Vec<Value> = plan.inputs.iter().map(input).collect();
        // A metric may read labels that the loss does not.
        let evaluation = plan_dir::read(&self.path.join(layout::EVALUATION)).ok();
        let of_evaluation = evaluation.iter().flat_map(|evaluation| &evaluation.inputs);
        let is_other = |i: &&InputSpec| plan.inputs.iter().all(|own| own.name != i.name);
        let others: Vec<Value> = of_evaluation.filter(is_other).map(input).collect();
        let batch = plan.batch().unwrap_or(1);
        let hyper: Vec<&str> = plan.hyper.iter().map(|h| h.name.as_str()).collect();
        let params: Vec<&str> = plan.params.iter().map(|p| p.name.as_str()).collect();
        json!({"name": plan.name, "ranks": plan.world_size, "batch": batch,
               "accumulation": plan.accumulation, "config": plan.config, "inputs": inputs,
               "evaluation_inputs": others, "parameters": params, "hyper": hyper, "trains": plan.eval.is_none()})
        .to_string()
    }

    /// A view of `frit inspect` as JSON.
    fn view(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        let view = <View as clap::ValueEnum>::from_str(name, false)
            .map_err(pyo3::exceptions::PyValueError::new_err)?;
        Ok(py.detach(|| inspect::to_json(&self.plan, view).to_string()))
    }

    /// The first screen of the report, as a page.
    fn screen(&self, py: Python<'_>) -> PyResult<String> {
        let found = py.detach(|| {
            let predicted = predict::step(&self.plan)?;
            Ok(frit::report::screen(&self.plan, &predicted))
        });
        refused(py, found)
    }

    /// Writes the report, with runs and a measured step, and unless it is to be quick the certificate; returns the warnings.
    fn report<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        metrics: Vec<PathBuf>,
        trace: Option<PathBuf>,
        quick: bool,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let found = py.detach(|| {
            let found = report::measured(&self.path, &self.plan, &metrics, trace.as_deref())?;
            let certified = match quick {
                true => Certified::left_out(&self.path),
                false => report::certified(&self.path),
            };
            report::write(&self.plan, &certified, &found, &path)?;
            Ok(found)
        });
        refused(py, found)?.warnings().iter().map(|d| error::of_diagnostic(py, d)).collect()
    }

    /// Verifies the plan and the files beside it, and unless it is to be quick certifies what its model became; as JSON.
    fn verify(&self, py: Python<'_>, quick: bool) -> PyResult<String> {
        let found = py.detach(|| {
            let plans = verify::verify(&self.path)?;
            let certify = || verify::certified(&self.path, None, false);
            let certificate = if quick { None } else { Some(certify()?) };
            if let Some(error) = certificate.as_ref().and_then(|c| verify::open(&self.path, c)) {
                return Err(error.into());
            }
            Ok(json!({ "plans": plans, "certificate": certificate }).to_string())
        });
        refused(py, found)
    }

    /// The prediction of a step on a cluster, by default the plan's, as JSON.
    #[pyo3(signature = (cluster = None))]
    fn simulate(&self, py: Python<'_>, cluster: Option<&str>) -> PyResult<String> {
        let found = py.detach(|| {
            let cluster = match cluster {
                Some(name) => clusters::read(name)?,
                None => predict::cluster(&self.plan)?,
            };
            Ok(json!(simulate(&self.plan, &cluster)).to_string())
        });
        refused(py, found)
    }

    /// The differences to another plan as JSON.
    fn diff(&self, py: Python<'_>, other: &Bound<'_, Plan>) -> PyResult<String> {
        let other = &other.get().plan;
        refused(py, py.detach(|| diff::compare(&self.plan, other))).map(|found| found.to_string())
    }
}

/// A result, with a report as an exception.
fn refused<T>(py: Python<'_>, result: Result<T, Report>) -> PyResult<T> {
    result.map_err(|report| error::of_report(py, &report))
}
