//! Training data: `.safetensors` and `.npz` with one tensor per input, or `.bin` with u16 tokens.
//!
//! A tensor is per-example if its shape is that of the input with another first axis, replicated if it
//! is exactly the input's. One global batch has (per-rank batch) × ranks × accumulation examples; rank
//! `r` takes its `r`-th contiguous slice, of which micro-step `a` takes the `a`-th part. Batches follow
//! one another and wrap at the end of an epoch; examples that fill no whole batch are left out. If the
//! plan shuffles, every epoch has its own order, which depends on the seed and the epoch only. Of a `.bin`, example `i` is the `i`-th window of T + 1 tokens: the
//! first T are the input, the last T the labels.

use crate::RunError;
use crate::checkpoint::Position;
use frit_ir::plan::{InputSpec, Plan};
use frit_ir::{DType, TensorType};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// All examples of a file, as the plan's inputs want them.
pub struct Data {
    columns: Vec<Column>,
    n_examples: usize,
    ranks: usize,
    accumulation: usize,
    batch: usize,
    /// Whether what is left after the last full step of an epoch makes a smaller step.
    keep_rest: bool,
    /// The seed of the order, if examples are shuffled.
    seed: Option<u64>,
    /// The epoch whose order was last asked for, and the order.
    order: Mutex<(usize, Arc<[usize]>)>,
}

struct Column {
    buffer: usize,
    bytes: Vec<u8>,
    /// Bytes of one example; `None` if the tensor is replicated.
    example: Option<usize>,
}

/// Where a step is in the data.
struct Place {
    epoch: usize,
    /// First example within the epoch's order.
    first: usize,
    micro_steps: usize,
}

struct Array {
    ty: TensorType,
    bytes: Vec<u8>,
}

impl Data {
    /// Reads a file for a plan.
    ///
    /// # Errors
    /// If the file cannot be read, lacks a tensor, has one of another dtype or shape, or has fewer
    /// examples than one global batch.
    pub fn load(path: &Path, plan: &Plan) -> Result<Data, RunError> {
        let mut arrays = read(path, plan)?;
        let mut columns = Vec::new();
        let (mut n_examples, mut batch) = (None, 1);
        for input in &plan.inputs {
            let array = arrays.remove(&input.name).ok_or_else(|| {
                let reason = format!("no tensor `{}`; the plan wants {}", input.name, input.ty);
                RunError::data(path, reason)
            })?;
            let column = column(path, input, array)?;
            if let Some(example) = column.example {
                let n = column.bytes.len().checked_div(example).unwrap_or(0);
                if n_examples.is_some_and(|m| m != n) {
                    let reason = format!("`{}` has {n} examples, others do not", input.name);
                    return Err(RunError::data(path, reason));
                }
                n_examples = Some(n);
                batch = input.ty.shape.0[0];
            }
            columns.push(column);
        }
        let (ranks, accumulation) = (plan.world_size, plan.accumulation);
        let n_examples = n_examples.unwrap_or(batch * ranks * accumulation);
        let keep_rest = !plan.drop_last;
        let micro_steps = if keep_rest { 1 } else { accumulation };
        let needed = batch * ranks * micro_steps;
        if plan.eval.is_none() && n_examples < needed {
            let reason = format!(
                "{n_examples} examples are fewer than one global batch of {needed} \
                 ({batch} per rank × {ranks} ranks × {micro_steps} micro-steps)"
            );
            return Err(RunError::data(path, reason));
        }
        let seed = plan.shuffle.then_some(plan.seed);
        let order = Mutex::new((usize::MAX, Arc::from([])));
        Ok(Data { columns, n_examples, ranks, accumulation, batch, keep_rest, seed, order })
    }

    /// Examples of one step over all ranks.
    fn global_batch(&self) -> usize {
        self.batch * self.ranks * self.accumulation
    }

    /// Where step `step` begins to read.
    pub fn position(&self, step: usize) -> Position {
        let Place { epoch, first, .. } = self.place(step);
        Position { epoch, example: first }
    }

    /// The step that begins to read at a position or, where the global batch had another size when it was
    /// noted, whose batch holds it.
    pub fn step_at(&self, position: Position) -> usize {
        let steps = self.steps_per_epoch();
        position.epoch * steps + (position.example / self.global_batch()).min(steps - 1)
    }

    /// Hands over what rank `rank` reads in micro-step `micro` of step `step`: buffer and bytes.
    ///
    /// # Errors
    /// The first error of `put`.
    pub fn feed<E>(
        &self,
        step: usize,
        micro: usize,
        rank: usize,
        mut put: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Place { epoch, first, micro_steps } = self.place(step);
        let first = first + (rank * micro_steps + micro) * self.batch;
        let order = self.seed.map(|seed| self.order(seed, epoch));
        let mut picked = Vec::new();
        for column in &self.columns {
            match (column.example, &order) {
                (Some(example), None) => {
                    let begin = first * example;
                    put(column.buffer, &column.bytes[begin..begin + self.batch * example])?;
                }
                (Some(example), Some(order)) => {
                    picked.clear();
                    for i in &order[first..first + self.batch] {
                        picked.extend_from_slice(&column.bytes[i * example..(i + 1) * example]);
                    }
                    put(column.buffer, &picked)?;
                }
                (None, _) => put(column.buffer, &column.bytes)?,
            }
        }
        Ok(())
    }

    /// Micro-steps of a step: fewer at the end of an epoch if the rest is kept and does not fill a step.
    pub fn micro_steps(&self, step: usize) -> usize {
        self.place(step).micro_steps
    }

    /// Micro-steps that the examples left after the last full step of an epoch fill, if they are kept.
    fn rest(&self) -> usize {
        let rest = self.n_examples % self.global_batch() / (self.batch * self.ranks);
        if self.keep_rest { rest } else { 0 }
    }

    fn steps_per_epoch(&self) -> usize {
        self.n_examples / self.global_batch() + usize::from(self.rest() > 0)
    }

    fn place(&self, step: usize) -> Place {
        let (global, steps) = (self.global_batch(), self.steps_per_epoch());
        let at = step % steps;
        let is_full = (at + 1) * global <= self.n_examples;
        let micro_steps = if is_full { self.accumulation } else { self.rest() };
        Place { epoch: step / steps, first: at * global, micro_steps }
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.n_examples
    }

    /// Whether there are no examples.
    pub fn is_empty(&self) -> bool {
        self.n_examples == 0
    }

    /// Batches of all ranks in which every example comes once; the last may not be full.
    pub fn batches(&self) -> usize {
        self.n_examples.div_ceil(self.batch * self.ranks)
    }

    /// Hands over what rank `rank` reads in batch `number` when every example comes once, in the file's
    /// order: buffer and bytes. Returns how many examples count; the others, at the end, fill the batch.
    ///
    /// # Errors
    /// Those of `put`.
    pub fn feed_once(
        &self,
        number: usize,
        rank: usize,
        mut put: impl FnMut(usize, &[u8]) -> Result<(), RunError>,
    ) -> Result<usize, RunError> {
        let first = (number * self.ranks + rank) * self.batch;
        let mut bytes = Vec::new();
        for column in &self.columns {
            let Some(example) = column.example else {
                put(column.buffer, &column.bytes)?;
                continue;
            };
            bytes.clear();
            for i in (first..first + self.batch).map(|i| i % self.n_examples.max(1)) {
                bytes.extend_from_slice(&column.bytes[i * example..(i + 1) * example]);
            }
            put(column.buffer, &bytes)?;
        }
        Ok(self.n_examples.saturating_sub(first).min(self.batch))
    }

    /// The order of an epoch's examples.
    fn order(&self, seed: u64, epoch: usize) -> Arc<[usize]> {
        let mut last = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if last.0 != epoch {
            *last = (epoch, shuffled(self.n_examples, seed, epoch).into());
        }
        Arc::clone(&last.1)
    }
}

/// A permutation of `0..n` by Fisher and Yates.
fn shuffled(n: usize, seed: u64, epoch: usize) -> Vec<usize> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    random.set_stream(epoch as u64);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        // The bias of the remainder is below n / 2⁶⁴.
        order.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}

/// A buffer and what is written to it.
pub(crate) type Fed = (usize, Vec<u8>);

/// Reads tensors exactly as the plan's inputs are declared, for one batch of every rank alike: buffers
/// and bytes. Inputs in `optional` may be missing; false if any is.
///
/// # Errors
/// If the file cannot be read, lacks a tensor, or has one of another dtype or shape.
pub(crate) fn read_inputs(
    path: &Path,
    plan: &Plan,
    optional: &[String],
) -> Result<(Vec<Fed>, bool), RunError> {
    let mut arrays = read(path, plan)?;
    let (mut fed, mut complete) = (Vec::new(), true);
    for input in &plan.inputs {
        let exact = InputSpec { per_example: false, ..input.clone() };
        let Some(array) = arrays.remove(&input.name) else {
            if !optional.contains(&input.name) {
                let reason = format!("no tensor `{}`; the plan wants {}", input.name, input.ty);
                return Err(RunError::data(path, reason));
            }
            complete = false;
            continue;
        };
        let column = column(path, &exact, array)?;
        fed.push((column.buffer, column.bytes));
    }
    Ok((fed, complete))
}

/// All tensors of a file, by name.
fn read(path: &Path, plan: &Plan) -> Result<BTreeMap<String, Array>, RunError> {
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    match extension.as_deref() {
        Some("safetensors") => read_safetensors(path),
        Some("npz") => read_npz(path),
        Some("bin") => read_tokens(path, plan),
        _ => {
            let reason = "unknown kind of data; use .safetensors, .npz or .bin";
            Err(RunError::data(path, reason))
        }
    }
}

fn column(path: &Path, input: &InputSpec, array: Array) -> Result<Column, RunError> {
    let fail = |what: String| {
        let reason = format!("tensor `{}` {what}; the plan wants {}", input.name, input.ty);
        Err(RunError::data(path, reason))
    };
    let (found, wanted) = (&array.ty.shape.0, &input.ty.shape.0);
    let example = match (found.split_first(), wanted.split_first()) {
        _ if !input.per_example => None,
        (Some((_, f)), Some((_, w))) if f == w => {
            Some(w.iter().product::<usize>() * input.ty.dtype.size())
        }
        _ => return fail(format!("has shape {}", array.ty.shape)),
    };
    if example.is_none() && found != wanted {
        return fail(format!("has shape {}", array.ty.shape));
    }
    let bytes = match (array.ty.dtype, input.ty.dtype) {
        (f, w) if f == w => array.bytes,
        (DType::I32, DType::I64) => array
            .bytes
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|b| i64::from(i32::from_le_bytes(*b)).to_le_bytes())
            .collect(),
        (f, _) => return fail(format!("is {f}")),
    };
    Ok(Column { buffer: input.buffer, bytes, example })
}

fn read_safetensors(path: &Path) -> Result<BTreeMap<String, Array>, RunError> {
    use safetensors::Dtype;
    let bytes = std::fs::read(path).map_err(RunError::io(path))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|e| RunError::data(path, format!("not a safetensors file: {e}")))?;
    let mut arrays = BTreeMap::new();
    for (name, view) in file.iter() {
        let dtype = match view.dtype() {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::I64 => DType::I64,
            Dtype::I32 => DType::I32,
            Dtype::U8 => DType::U8,
            Dtype::BOOL => DType::Bool,
            _ => continue,
        };
        let ty = TensorType::new(dtype, view.shape());
        arrays.insert(name.to_string(), Array { ty, bytes: view.data().to_vec() });
    }
    Ok(arrays)
}

fn read_npz(path: &Path) -> Result<BTreeMap<String, Array>, RunError> {
    let mut archive = npyz::npz::NpzArchive::open(path).map_err(RunError::io(path))?;
    let names: Vec<String> = archive.array_names().map(str::to_string).collect();
    let mut arrays = BTreeMap::new();
    for name in names {
        let Some(array) = archive.by_name(&name).map_err(RunError::io(path))? else { continue };
        let shape: Vec<usize> = array.shape().iter().map(|d| *d as usize).collect();
        if array.header().order() != npyz::Order::C {
            let reason = format!("array `{name}` is in Fortran order; save it in C order");
            return Err(RunError::data(path, reason));
        }
        let kind = array.dtype().descr();
        let io = RunError::io(path);
        macro_rules! read {
            ($t:ty, $dtype:expr) => {{
                let values: Vec<$t> = array.into_vec().map_err(io)?;
                let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                Array { ty: TensorType::new($dtype, shape), bytes }
            }};
        }
        let array = match kind.trim_matches('\'') {
            "<f8" => read!(f64, DType::F64),
            "<f4" => read!(f32, DType::F32),
            "<i8" => read!(i64, DType::I64),
            "<i4" => read!(i32, DType::I32),
            "|u1" => read!(u8, DType::U8),
            // Arrays of other kinds may be there for other programs.
            _ => continue,
        };
        arrays.insert(name, array);
    }
    Ok(arrays)
}

/// Windows of T + 1 tokens; the plan must have one integer input and labels of the same shape.
fn read_tokens(path: &Path, plan: &Plan) -> Result<BTreeMap<String, Array>, RunError> {
    let [input, labels] = &plan.inputs[..] else {
        return Err(RunError::data(path, "token files need a plan with one input and labels"));
    };
    let shape = &input.ty.shape.0;
    if shape.len() != 2 || labels.ty != input.ty || input.ty.dtype != DType::I64 {
        let reason = format!("token files need i64 inputs [batch, T], not {}", input.ty);
        return Err(RunError::data(path, reason));
    }
    let bytes = std::fs::read(path).map_err(RunError::io(path))?;
    let tokens: Vec<i64> =
        bytes.as_chunks::<2>().0.iter().map(|b| i64::from(u16::from_le_bytes(*b))).collect();
    let t = shape[1];
    let n = (tokens.len().saturating_sub(1)) / t;
    let window = |offset: usize| Array {
        ty: TensorType::new(DType::I64, [n, t]),
        bytes: tokens[offset.min(tokens.len())..]
            .iter()
            .take(n * t)
            .flat_map(|x| x.to_le_bytes())
            .collect(),
    };
    Ok([(input.name.clone(), window(0)), (labels.name.clone(), window(1))].into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(n: usize, ranks: usize, seed: Option<u64>) -> Data {
        let column = Column { buffer: 0, bytes: (0..n as u8).collect(), example: Some(1) };
        let order = Mutex::new((usize::MAX, Arc::from([])));
        let (columns, accumulation, batch) = (vec![column], 1, 2);
        Data { columns, n_examples: n, ranks, accumulation, batch, keep_rest: false, seed, order }
    }

    /// The examples of an epoch, step by step and rank by rank.
    fn epoch(data: &Data, number: usize) -> Vec<u8> {
        let steps = data.n_examples / (data.batch * data.ranks);
        let mut seen = Vec::new();
        for step in number * steps..(number + 1) * steps {
            for rank in 0..data.ranks {
                let put = |_, bytes: &[u8]| -> Result<(), ()> {
                    seen.extend_from_slice(bytes);
                    Ok(())
                };
                data.feed(step, 0, rank, put).unwrap();
            }
        }
        seen
    }

    #[test]
    fn epochs_repeat_in_order_and_drop_the_last_part() {
        let data = data(11, 2, None);
        assert_eq!(epoch(&data, 0), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(epoch(&data, 1), epoch(&data, 0));
    }

    #[test]
    fn positions_name_the_same_examples_at_other_batches() {
        let (one, two) = (data(24, 1, None), data(24, 2, None));
        for step in [0, 1, 5, 6, 17] {
            assert_eq!(two.step_at(two.position(step)), step);
            assert_eq!(one.step_at(two.position(step)), 2 * step);
        }
        assert_eq!(one.position(13), Position { epoch: 1, example: 2 });
        // The last examples of an epoch that the larger batch leaves out.
        assert_eq!(data(10, 2, None).step_at(data(10, 1, None).position(4)), 1);
    }

    #[test]
    fn the_rest_of_an_epoch_makes_a_smaller_step() {
        // Steps of 3 micro-steps of 2 ranks × 2 examples; 21 examples are one step, 2 micro-steps, and
        // one example that fills no micro-step.
        let mut data = data(21, 2, None);
        (data.accumulation, data.keep_rest) = (3, true);
        assert_eq!((0..4).map(|s| data.micro_steps(s)).collect::<Vec<_>>(), [3, 2, 3, 2]);
        let mut seen = Vec::new();
        for rank in 0..2 {
            for micro in 0..2 {
                let put = |_, bytes: &[u8]| {
                    seen.extend_from_slice(bytes);
                    Ok::<(), ()>(())
                };
                data.feed(3, micro, rank, put).unwrap();
            }
        }
        assert_eq!(seen, [12, 13, 14, 15, 16, 17, 18, 19]);
        data.keep_rest = false;
        assert_eq!((0..3).map(|s| data.micro_steps(s)).collect::<Vec<_>>(), [3, 3, 3]);
    }

    #[test]
    fn shuffled_epochs_hold_every_example_once_in_their_own_order() {
        let orders: Vec<Vec<u8>> = (0..3).map(|e| epoch(&data(12, 1, Some(7)), e)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..12).collect::<Vec<u8>>());
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2]);
        // Neither the ranks nor what was asked before change the order.
        let two = data(12, 2, Some(7));
        assert_eq!(epoch(&two, 2), orders[2]);
        assert_eq!(epoch(&two, 0), orders[0]);
        assert_ne!(epoch(&data(12, 1, Some(8)), 0), orders[0]);
    }
}
