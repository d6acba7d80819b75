//! Trainers: sessions that are fed batch by batch.

use crate::error;
use crate::tensors::{self, Triple};
use crate::wait::attentively;
use frit::export::{self, Trained};
use frit_runtime::RunError;
use frit_runtime::checkpoint::CheckpointOptions;
use frit_runtime::metrics::StepMetrics;
use frit_runtime::trainer::{self, Evaluated, Evaluating, TrainerOptions};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

/// A trainer, and the evaluation that is under way.
struct State {
    trainer: trainer::Trainer,
    evaluating: Option<Evaluating>,
}

/// The training of a plan. One Python thread at a time uses it.
#[pyclass(frozen, module = "frit._frit")]
pub(crate) struct Trainer {
    state: Mutex<State>,
}

#[pymethods]
impl Trainer {
    /// Loads the plan directory `path`, and initializes or resumes its training.
    #[new]
    #[pyo3(signature = (path, weights, checkpoint, every, keep, resume, metrics, threads, hyper, max_skipped, evaluation))]
    #[expect(clippy::too_many_arguments, reason = "the package calls it by name, with all options")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        weights: Vec<PathBuf>,
        checkpoint: Option<PathBuf>,
        every: Option<usize>,
        keep: Option<usize>,
        resume: bool,
        metrics: Option<PathBuf>,
        threads: Option<usize>,
        hyper: Vec<(String, f64)>,
        max_skipped: Option<usize>,
        evaluation: bool,
    ) -> PyResult<Trainer> {
        let checkpoint = checkpoint.map(|dir| CheckpointOptions { dir, every, resume, keep });
        let options = TrainerOptions {
            weights,
            checkpoint,
            metrics,
            threads,
            hyper,
            max_skipped,
            without_evaluation: !evaluation,
        };
        let opened = attentively(py, |tick| trainer::Trainer::open(&path, options, tick))?;
        let trainer = opened.map_err(|e| error::of_run_error(py, e))?;
        Ok(Trainer { state: Mutex::new(State { trainer, evaluating: None }) })
    }

    /// This process's rank: 0, unless every rank is a process.
    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.state()?.trainer.rank())
    }

    /// Steps that were run, those of a resumed checkpoint included.
    #[getter]
    fn steps(&self) -> PyResult<usize> {
        Ok(self.state()?.trainer.steps())
    }

    /// The warnings since the last call.
    fn take_warnings(&self) -> PyResult<Vec<String>> {
        Ok(self.state()?.trainer.take_warnings())
    }

    /// Runs one step on a dict of arrays; returns its metrics.
    fn step<'py>(
        &self,
        py: Python<'py>,
        batch: &Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut state = self.state()?;
        let batch = tensors::batch(batch)?.map_err(|e| error::of_run_error(py, e))?;
        let trainer = &mut state.trainer;
        let metrics = waited(py, |tick| trainer.step(&batch, tick))?;
        of_step(py, &metrics)
    }

    /// Begins to evaluate the current parameters.
    fn begin_evaluation(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.state()?;
        let begun = state.trainer.begin_evaluation();
        state.evaluating = Some(begun.map_err(|e| error::of_run_error(py, e))?);
        Ok(())
    }

    /// Evaluates a dict of arrays, too.
    fn evaluate(&self, py: Python<'_>, batch: &Bound<'_, PyDict>) -> PyResult<()> {
        let mut state = self.state()?;
        let batch = tensors::batch(batch)?.map_err(|e| error::of_run_error(py, e))?;
        let State { trainer, evaluating } = &mut *state;
        let evaluating = evaluating.as_mut().ok_or_else(|| PyRuntimeError::new_err("not begun"))?;
        waited(py, |tick| trainer.evaluate(evaluating, &batch, tick))
    }

    /// Ends an evaluation; returns its loss and metrics.
    fn evaluated<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut state = self.state()?;
        let evaluating = state.evaluating.take();
        let evaluating = evaluating.ok_or_else(|| PyRuntimeError::new_err("not begun"))?;
        let found = state.trainer.evaluated(&evaluating).map_err(|e| error::of_run_error(py, e))?;
        of_evaluation(py, &found)
    }

    /// The parameters, or their moving averages: names with element type, shape and bytes.
    fn state_dict<'py>(
        &self,
        py: Python<'py>,
        average: bool,
    ) -> PyResult<Vec<(String, Triple<'py>)>> {
        let trainer = &mut self.state()?.trainer;
        let all = waited(py, |tick| trainer.state(average, tick))?;
        let stored = |(name, (ty, bytes)): (String, trainer::Stored)| {
            (name, tensors::triple(py, ty.dtype, ty.shape.dims(), &bytes))
        };
        Ok(all.into_iter().map(stored).collect())
    }

    /// Replaces all parameters by a dict of arrays.
    fn load_state_dict(&self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<()> {
        let trainer = &mut self.state()?.trainer;
        let state = tensors::batch(state)?.map_err(|e| error::of_run_error(py, e))?;
        waited(py, |tick| trainer.load(&state, tick))
    }

    /// Writes the parameters, or their moving averages, to a file.
    fn save(&self, py: Python<'_>, path: PathBuf, average: bool) -> PyResult<()> {
        let trainer = &mut self.state()?.trainer;
        waited(py, |tick| trainer.save(&path, average, tick))
    }

    /// Writes the adapter, or its moving average, in PEFT's format into a folder.
    fn save_adapter(&self, py: Python<'_>, folder: PathBuf, average: bool) -> PyResult<()> {
        let trained = self.trained(py, average)?;
        let Some(trained) = trained else { return Ok(()) };
        let written = py.detach(|| export::peft(&trained, &folder));
        written.map(|_| ()).map_err(|report| error::of_report(py, &report))
    }

    /// Writes the model with the parameters, or their moving averages, as ONNX; returns the warnings.
    fn export<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        average: bool,
        training: bool,
        external_data: bool,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let Some(trained) = self.trained(py, average)? else { return Ok(vec![]) };
        let options = export::Options { training, external_data, ..export::Options::default() };
        let written = py.detach(|| export::onnx(&trained, &options, &path));
        let written = written.map_err(|report| error::of_report(py, &report))?;
        written.warnings.iter().map(|d| error::of_diagnostic(py, d)).collect()
    }

    /// Saves a checkpoint now.
    fn checkpoint(&self, py: Python<'_>) -> PyResult<()> {
        let trainer = &mut self.state()?.trainer;
        waited(py, |tick| trainer.checkpoint(tick))
    }

    /// Ends the session, after a last checkpoint.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let trainer = &mut self.state()?.trainer;
        waited(py, |tick| trainer.close(tick))
    }
}

impl Trainer {
    /// The parameters for an export; none on ranks other than 0.
    fn trained(&self, py: Python<'_>, average: bool) -> PyResult<Option<Trained>> {
        let trainer = &mut self.state()?.trainer;
        let all = waited(py, |tick| trainer.state(average, tick))?;
        let is_first = trainer.rank() == 0;
        Ok(is_first.then(|| Trained::given(trainer.path(), all.into_iter().collect())))
    }

    /// The state, unless another thread uses it: waiting for it with the interpreter's lock could wait forever.
    fn state(&self) -> PyResult<MutexGuard<'_, State>> {
        let in_use = |_| PyRuntimeError::new_err("the trainer is in use by another thread");
        self.state.try_lock().map_err(in_use)
    }
}

/// Waits for a trainer.
fn waited<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut()) -> Result<T, RunError> + Send,
) -> PyResult<T> {
    attentively(py, work)?.map_err(|e| error::of_run_error(py, e))
}

fn of_step<'py>(py: Python<'py>, metrics: &StepMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", metrics.step)?;
    dict.set_item("loss", metrics.loss)?;
    dict.set_item("grad_norm", metrics.grad_norm)?;
    dict.set_item("lr", metrics.lr)?;
    dict.set_item("loss_scale", metrics.loss_scale)?;
    dict.set_item("skipped", metrics.skipped)?;
    dict.set_item("tokens_or_examples_per_s", metrics.tokens_or_examples_per_s)?;
    dict.set_item("step_seconds", metrics.step_seconds)?;
    dict.set_item("memory_bytes", metrics.memory_bytes)?;
    Ok(dict)
}

fn of_evaluation<'py>(py: Python<'py>, found: &Evaluated) -> PyResult<Bound<'py, PyDict>> {
    let (dict, losses) = (PyDict::new(py), PyList::empty(py));
    for loss in &found.losses {
        let one = PyDict::new(py);
        one.set_item("name", &loss.name)?;
        one.set_item("weight", loss.weight)?;
        one.set_item("loss", loss.loss)?;
        one.set_item("count", loss.count)?;
        losses.append(one)?;
    }
    dict.set_item("loss", found.loss)?;
    dict.set_item("losses", losses)?;
    dict.set_item("metrics", found.metrics.clone())?;
    dict.set_item("examples", found.examples)?;
    dict.set_item("batches", found.batches)?;
    dict.set_item("examples_per_s", found.examples_per_s)?;
    Ok(dict)
}
