//! Command line arguments of `frit run` and `frit-run`.

use crate::RunError;
use crate::checkpoint::CheckpointOptions;
use crate::files::Place;
use crate::interrupt;
use crate::run::RunOptions;
use crate::validation::ValidationOptions;
use frit_data::{Source, TokenDType};
use std::path::PathBuf;

/// The plan, the data, and options of the run.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("parameters_written").multiple(true)))]
pub struct Arguments {
    /// The plan directory.
    pub plan: PathBuf,
    // Not flattened: a flattened optional group cannot contain required arguments.
    /// Files, folders or quoted patterns ('shards/*.bin'), in sequence: .safetensors, .parquet or .npz
    /// with one tensor per input, a folder of .npy files, or .bin or .npy with tokens.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// The type of the tokens in .bin files without a header; by default u16.
    #[arg(long, value_name = "TYPE")]
    pub token_dtype: Option<TokenDType>,
    /// Steps, counted from the start of training.
    #[arg(long, default_value_t = 1)]
    pub steps: usize,
    /// Start from the parameters of these files, named as by --save, instead of the plan's; later
    /// files take precedence. A shard index or a folder of Hugging Face libraries stands for its files,
    /// and an adapter of PEFT leaves the model as it is. With --resume only if there is no checkpoint
    /// yet, or for parameters that it omits.
    #[arg(long, value_name = "FILE.safetensors", num_args = 1..)]
    pub weights: Vec<PathBuf>,
    /// Omit frozen parameters and buffers that no step changes from checkpoints and the files of --save and
    /// --save-ema.
    #[arg(long, requires = "parameters_written")]
    pub trained_only: bool,
    /// Append one JSON object per step to this file.
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Write event files into this folder, for `tensorboard --logdir`.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Write the first step's gradients, unscaled and unclipped, to this safetensors file.
    #[arg(long, value_name = "FILE")]
    pub dump_grads: Option<PathBuf>,
    /// Write the parameters after the last step to this safetensors file.
    #[arg(long, value_name = "FILE.safetensors", group = "parameters_written")]
    pub save: Option<PathBuf>,
    /// Write checkpoints into this directory: after the last step, on Ctrl-C, and as --checkpoint-every says.
    #[arg(long, value_name = "DIR", group = "parameters_written")]
    pub checkpoint: Option<PathBuf>,
    /// Steps between checkpoints.
    #[arg(long, value_name = "STEPS", requires = "checkpoint", value_parser = at_least_one)]
    pub checkpoint_every: Option<usize>,
    /// Continue from the latest checkpoint of the directory; from the start if there is none.
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
    /// Keep only the newest checkpoints.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = at_least_one)]
    pub keep: Option<usize>,
    /// Evaluate the examples of these files between steps and after the last step; by default those
    /// of data.validation. The file `best` names the best checkpoint.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub validation: Vec<PathBuf>,
    /// Steps between validations; by default those between checkpoints.
    #[arg(long, value_name = "STEPS", value_parser = at_least_one)]
    pub validate_every: Option<usize>,
    /// Stop early after this many consecutive validations without a new lowest loss.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub patience: Option<usize>,
    /// Write a Chrome trace of the last step: measured and predicted times of every task, in all micro-steps.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Write the moving average of the parameters (optimizer.ema) after the last step to this file.
    #[arg(long, value_name = "FILE.safetensors", group = "parameters_written")]
    pub save_ema: Option<PathBuf>,
    /// Write the device memory and the launches that the run used to this JSON file.
    #[arg(long, value_name = "FILE.json")]
    pub usage: Option<PathBuf>,
    /// Execute kernel bodies with the IR interpreter instead of machine code (slow).
    #[arg(long)]
    pub interpret: bool,
    /// Stop at the first task that produces inf or NaN, and name the operation and the cause (slow).
    #[arg(long)]
    pub check_numerics: bool,
    /// Write histograms of exponents by scope to this JSON file, for `frit inspect --numerics` (slow).
    #[arg(long, value_name = "FILE.json")]
    pub numerics: Option<PathBuf>,
    /// Exit with code 1 after this many consecutive skipped steps (100).
    #[arg(long, value_name = "STEPS", value_parser = at_least_one)]
    pub max_skipped: Option<usize>,
    /// Threads per rank; by default the cores divided by the ranks.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Seconds in which the first start on a GPU measures candidates of kernels (120); what is not measured then is
    /// chosen without.
    #[arg(long, value_name = "SECONDS")]
    pub tuning_seconds: Option<u64>,
    /// Change a hyper-parameter of the plan, such as optimizer.lr=3e-4.
    #[arg(long, value_name = "KEY=NUMBER", value_parser = setting)]
    pub set: Vec<(String, f64)>,
}

fn setting(text: &str) -> Result<(String, f64), String> {
    let (key, value) = text.split_once('=').ok_or("write for example --set optimizer.lr=3e-4")?;
    // Whether the key accepts the value is checked against the plan.
    Ok((key.into(), value.parse().unwrap_or(f64::NAN)))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "give a whole number of at least 1".into())
}

impl Arguments {
    /// Whether a file is written to standard output, where nothing else may then be printed.
    pub fn writes_to_standard_output(&self) -> bool {
        let all = [&self.metrics, &self.dump_grads, &self.save, &self.save_ema, &self.trace];
        let all = all.into_iter().chain([&self.usage, &self.numerics]);
        all.flatten().any(|path| Place::is_standard_output(path))
    }

    /// Converts the arguments to options with progress output. With checkpoints, signals are handled from here on.
    ///
    /// # Errors
    /// If signal handlers cannot be installed.
    pub fn options(self) -> Result<RunOptions, RunError> {
        let checkpoint = self.checkpoint.map(|dir| CheckpointOptions {
            dir,
            every: self.checkpoint_every,
            resume: self.resume,
            keep: self.keep,
        });
        // Without checkpoints there is nothing to save before exiting.
        let stop = checkpoint.as_ref().map(|_| interrupt::watch()).transpose();
        let (every, tokens) = (self.validate_every, self.token_dtype);
        // Without files, those of the plan.
        let validation = (!self.validation.is_empty() || every.is_some())
            .then(|| ValidationOptions { data: Source::new(self.validation, tokens), every });
        Ok(RunOptions {
            steps: self.steps,
            data: Source::new(self.data, tokens),
            weights: self.weights,
            trained_only: self.trained_only,
            metrics: self.metrics,
            tensorboard: self.tensorboard,
            dump_grads: self.dump_grads,
            save: self.save,
            save_ema: self.save_ema,
            checkpoint,
            validation,
            patience: self.patience,
            stop: stop.map_err(RunError::Signals)?,
            trace: self.trace,
            usage: self.usage,
            interpret: self.interpret,
            threads: self.threads,
            tuning_seconds: self.tuning_seconds,
            hyper: self.set,
            check_numerics: self.check_numerics,
            numerics: self.numerics,
            max_skipped: self.max_skipped,
            progress: true,
        })
    }
}
