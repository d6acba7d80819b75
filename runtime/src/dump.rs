//! Writes the outputs of a model over a data set to a safetensors file, batch by batch.
//!
//! The header is written first, since the number of examples is known; each batch is then written at its offset. Outputs
//! whose first axis is the batch cover all examples in data order; others are rank 0's of the first batch. Of examples that are a batch
//! each, all outputs lie one behind the other.

use crate::RunError;
use crate::device::Device;
use crate::files::{self, Sink};
use crate::save::safetensors_dtype;
use frit_ir::plan::{EvalSpec, Place};
use serde_json::json;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The examples of an evaluation.
#[derive(Clone, Copy)]
pub(crate) struct Examples {
    pub(crate) count: usize,
    /// Examples of one rank's batch.
    pub(crate) batch: usize,
    /// Whether an example is a whole batch, not a row of it.
    pub(crate) is_whole: bool,
}

/// A file of outputs that is being written under a temporary name.
pub(crate) struct Outputs {
    path: PathBuf,
    aside: PathBuf,
    file: Sink,
    /// First byte of every output, in the order of the evaluation.
    starts: Vec<u64>,
    examples: Examples,
}

impl Outputs {
    /// Opens the file and writes its header.
    ///
    /// # Errors
    /// If the file system refuses.
    pub(crate) fn create(
        path: &Path,
        eval: &EvalSpec,
        examples: Examples,
    ) -> Result<Outputs, RunError> {
        let mut header = serde_json::Map::new();
        let (mut starts, mut end) = (Vec::new(), 0);
        for output in &eval.outputs {
            let ty = &output.place.ty;
            let mut shape = ty.shape.0.clone();
            if examples.is_whole {
                shape.insert(0, examples.count);
            } else if examples.are_rows_of(&output.place) {
                shape[0] = examples.count;
            }
            let bytes = shape.iter().product::<usize>() as u64 * ty.dtype.size() as u64;
            let dtype = serde_json::to_value(safetensors_dtype(ty.dtype)).unwrap_or_default();
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
            header.insert(output.name.clone(), entry);
            starts.push(end);
            end += bytes;
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        // Elements begin at multiples of 8 bytes.
        header.resize(header.len().next_multiple_of(8), b' ');
        let aside = files::beside(path);
        let io = RunError::io(path);
        let opened = Sink::create(&aside).and_then(|mut file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            file.reserve(8 + header.len() as u64 + end)?;
            Ok(file)
        });
        let file = opened.map_err(|e| {
            // The first error is the one to report.
            let _ = files::remove(&aside);
            io(e)
        })?;
        starts.iter_mut().for_each(|start| *start += 8 + header.len() as u64);
        Ok(Outputs { path: path.into(), aside, file, starts, examples })
    }

    /// Writes the outputs of all ranks' batch `number`, in rank order, at their offsets.
    ///
    /// # Errors
    /// If the file system refuses.
    fn put(
        &mut self,
        number: usize,
        which: usize,
        place: &Place,
        bytes: &[u8],
    ) -> Result<(), RunError> {
        let size = place.ty.bytes();
        let Examples { count, batch, is_whole } = self.examples;
        let (start, bytes) = if is_whole || self.examples.are_rows_of(place) {
            let row = size / batch;
            let ranks = bytes.len() / size.max(1);
            let first = number * ranks * batch;
            let rows = count.saturating_sub(first).min(ranks * batch);
            (self.starts[which] + (first * row) as u64, &bytes[..rows * row])
        } else if number == 0 {
            (self.starts[which], &bytes[..size])
        } else {
            return Ok(());
        };
        let written =
            self.file.seek(SeekFrom::Start(start)).and_then(|_| self.file.write_all(bytes));
        written.map_err(RunError::io(&self.path))
    }

    /// Renames the file to its path.
    ///
    /// # Errors
    /// If the file system refuses.
    pub(crate) fn finish(self) -> Result<(), RunError> {
        let renamed = self.file.sync().and_then(|()| files::rename(&self.aside, &self.path));
        renamed.map_err(RunError::io(&self.path))
    }
}

impl Drop for Outputs {
    fn drop(&mut self) {
        // After the renaming there is nothing to remove.
        let _ = files::remove(&self.aside);
    }
}

impl Examples {
    /// Whether the first axis of an output is that of the examples.
    fn are_rows_of(self, place: &Place) -> bool {
        place.ty.shape.dims().first() == Some(&self.batch)
    }
}

/// Gathers the outputs of a batch on rank 0, which writes the file. All ranks must call it.
///
/// # Errors
/// If a device or another rank failed, or the file system refuses.
pub(crate) fn collect(
    eval: &EvalSpec,
    number: usize,
    device: &impl Device,
    file: &mut Option<Outputs>,
) -> Result<(), RunError> {
    for (which, output) in eval.outputs.iter().enumerate() {
        let place = &output.place;
        let bytes = device.gather(place.buffer, place.offset, place.ty.bytes())?;
        if let Some(file) = file {
            file.put(number, which, place, &bytes)?;
        }
    }
    Ok(())
}
