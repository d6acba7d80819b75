//! Training data: `.safetensors` and `.npz` with one tensor per input, or `.bin` with tokens; see docs/data.md.
//!
//! `form` says where the examples of a tensor are. A global batch has (per-rank batch) × ranks × accumulation examples; rank `r` takes its `r`-th contiguous slice, of
//! which micro-step `a` takes the `a`-th part. Batches wrap at the end of an epoch; examples that do not fill a batch are
//! dropped. With shuffling every epoch has its own order, which depends only on the seed and the epoch. Several files are
//! concatenated. A batch in memory is read like a file of these examples.
//!
//! Elements are copied to the device in the file's type if it is no larger than the input's, and widened there.

mod batch;
mod bytes;
mod check;
mod column;
mod element;
mod error;
mod form;
mod formats;
mod labels;
mod order;
mod source;

pub use batch::Batch;
pub use bytes::Bytes;
pub use element::{Element, convert};
pub use error::DataError;
pub use formats::TokenDType;
pub use order::Position;
pub use source::{Source, matching};

use column::{Column, Part};
use form::Form;
use formats::Contents;
use frit_ir::counted;
use frit_ir::plan::{BufferId, Plan};
use order::{Deal, Place, shuffled};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum bytes of integers that are checked on loading; larger data is checked batch by batch.
const CHECKED_AT_ONCE: usize = 8 << 30;

/// All examples of some files, by input of the plan.
pub struct Data {
    columns: Vec<Column>,
    files: Vec<File>,
    deal: Deal,
    has_whole_examples: bool,
    /// Whether batches are checked when they are fed.
    check_late: bool,
    /// The seed of the order, if examples are shuffled.
    seed: Option<u64>,
    /// The last requested epoch and its order.
    order: Mutex<(usize, Arc<[usize]>)>,
}

/// A file and the number of its first example.
struct File {
    path: PathBuf,
    first: usize,
}

impl Data {
    /// Reads files for a plan.
    ///
    /// # Errors
    /// If a file cannot be read, lacks a tensor, has one of another dtype or shape, or has an index out of range; or if
    /// there are fewer examples than one global batch.
    pub fn load(source: &Source, plan: &Plan) -> Result<Data, DataError> {
        let paths = source.paths()?;
        let read = |path: &PathBuf| formats::read(path, plan, source.tokens);
        let contents = paths.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let mut data = Data::of(paths, &contents, plan, plan.world_size)?;
        data.seed = plan.shuffle.then_some(plan.seed);
        let Deal { examples, ranks, accumulation, batch, keep_rest } = data.deal;
        let micro_steps = if keep_rest { 1 } else { accumulation };
        let needed = batch * ranks * micro_steps;
        if plan.eval.is_none() && examples < needed {
            let reason = format!(
                "{} fewer than one global batch of {needed} ({batch} per rank × {} × {}){}",
                match examples {
                    1 => "1 example is".into(),
                    n => format!("{n} examples are"),
                },
                counted(ranks, "rank"),
                counted(micro_steps, "micro-step"),
                data.tokens_note(),
            );
            return Err(DataError::content(&data.files[0].path, reason));
        }
        data.check()?;
        Ok(data)
    }

    /// How many tokens an example takes, for messages about too few of them; nothing for other files.
    fn tokens_note(&self) -> String {
        let is_tokens = |f: &File| f.path.extension().is_some_and(|e| e == "bin");
        let length = self.columns.first().and_then(|c| c.input.ty.shape.dims().last());
        match length.filter(|_| self.files.iter().all(is_tokens)) {
            Some(t) => {
                format!("; {t} tokens of a file are one example, and one more begins its labels")
            }
            None => String::new(),
        }
    }

    /// The examples of a batch in memory, in sequence: for this many ranks, or for one of several.
    ///
    /// # Errors
    /// As [`Data::load`], but there may be any number of examples.
    pub fn given(batch: &Batch, plan: &Plan, ranks: usize) -> Result<Data, DataError> {
        let contents = std::slice::from_ref(batch.contents());
        let mut data = Data::of(vec!["batch".into()], contents, plan, ranks)?;
        data.check()?;
        Ok(data)
    }

    /// Checks that the examples are those of one step.
    ///
    /// # Errors
    /// How many examples a step takes.
    pub fn is_one_step(&self) -> Result<(), DataError> {
        let Deal { examples, ranks, accumulation, batch, keep_rest } = self.deal;
        let (whole, micro) = (self.deal.global_batch(), batch * ranks);
        let is_rest = keep_rest && examples > 0 && examples < whole && examples % micro == 0;
        if examples == whole || is_rest {
            return Ok(());
        }
        let smaller = match keep_rest {
            true => format!(", or fewer in multiples of {micro}"),
            false => String::new(),
        };
        let reason = format!(
            "{}; a step takes {whole} ({batch} per rank × {} × {}){smaller}; let the loader make batches of this \
             size and drop an incomplete last one, or compile the model with another batch",
            counted(examples, "example"),
            counted(ranks, "rank"),
            counted(accumulation, "micro-step"),
        );
        Err(DataError::content(&self.files[0].path, reason))
    }

    /// The contents of files as data in sequence.
    fn of(
        paths: Vec<PathBuf>,
        contents: &[Contents],
        plan: &Plan,
        ranks: usize,
    ) -> Result<Data, DataError> {
        let forms = Form::of(&plan.inputs, contents);
        let (mut columns, mut files, mut examples) = (Vec::new(), Vec::new(), None);
        for (path, contents) in paths.into_iter().zip(contents) {
            let first = examples.unwrap_or(0);
            if let Some(n) = add(&path, contents, (plan, &forms), &mut columns)? {
                examples = Some(first + n);
            }
            files.push(File { path, first });
        }
        let batch =
            batch(&columns, plan).map_err(|reason| DataError::content(&files[0].path, reason))?;
        let (accumulation, keep_rest) = (plan.accumulation, !plan.drop_last);
        let examples = examples.unwrap_or(batch * ranks * accumulation);
        let order = Mutex::new((usize::MAX, Arc::from([])));
        let deal = Deal { examples, ranks, accumulation, batch, keep_rest };
        let has_whole_examples = forms.contains(&Form::Whole);
        Ok(Data { columns, files, deal, has_whole_examples, check_late: false, seed: None, order })
    }

    /// Checks all elements against the ranges of their inputs, unless there are too many.
    fn check(&mut self) -> Result<(), DataError> {
        let checked = |c: &&Column| c.is_checked();
        let parts = self.columns.iter().filter(checked).flat_map(|c| &c.parts);
        if parts.map(|p| p.len()).sum::<usize>() > CHECKED_AT_ONCE {
            self.check_late = true;
            return Ok(());
        }
        for column in self.columns.iter().filter(checked) {
            for (file, part) in self.files.iter().zip(&column.parts) {
                check::ranges(&file.path, &column.input, column.element, part, 0)?;
            }
        }
        Ok(())
    }

    /// That labels are the tokens of an input at another place than the next, if the first examples have no other.
    pub fn misplaced_labels(&self) -> Option<String> {
        labels::misplaced(&self.columns)
    }

    /// That every label of all examples is ignored, if it is so.
    pub fn ignored_labels(&self) -> Option<String> {
        labels::ignored(&self.columns)
    }

    /// The position at which step `step` begins to read.
    pub fn position(&self, step: usize) -> Position {
        let Place { epoch, first, .. } = self.deal.place(step);
        Position { epoch, example: first }
    }

    /// The step that begins to read at a position or, if it was recorded with another global batch size, whose batch
    /// contains it.
    pub fn step_at(&self, position: Position) -> usize {
        self.deal.step_at(position)
    }

    /// Passes what rank `rank` reads in micro-step `micro` of step `step` to `put`: buffer, type and bytes. Data for one
    /// of several ranks are those of every rank that asks.
    ///
    /// # Errors
    /// The first error of `put`, or an index out of range.
    pub fn feed<E: From<DataError>>(
        &self,
        step: usize,
        micro: usize,
        rank: usize,
        put: impl FnMut(BufferId, Element, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Place { epoch, first, micro_steps } = self.deal.place(step);
        let rank = rank % self.deal.ranks;
        let first = first + (rank * micro_steps + micro) * self.deal.batch;
        match self.seed.map(|seed| self.order(seed, epoch)) {
            None => self.put_range(first..first + self.deal.batch, put),
            Some(order) => self.put(order[first..first + self.deal.batch].iter().copied(), put),
        }
    }

    /// Micro-steps of a step; fewer at the end of an epoch if remaining examples are kept and do not fill a step.
    pub fn micro_steps(&self, step: usize) -> usize {
        self.deal.place(step).micro_steps
    }

    /// Examples of one rank's micro-batch.
    pub fn batch(&self) -> usize {
        self.deal.batch
    }

    /// Whether an example is all of each input, whose first axes differ.
    pub fn has_whole_examples(&self) -> bool {
        self.has_whole_examples
    }

    /// Number of examples.
    pub fn len(&self) -> usize {
        self.deal.examples
    }

    /// Whether there are no examples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of batches over all ranks in which every example occurs once; the last may be partial.
    pub fn batches(&self) -> usize {
        self.len().div_ceil(self.deal.batch * self.deal.ranks)
    }

    /// Passes what rank `rank` reads in batch `number` to `put`, where every example occurs once, in file order:
    /// buffer, type and bytes. Returns how many examples count; the others are padding at the end of the batch.
    ///
    /// # Errors
    /// Those of `put`, or an index out of range.
    pub fn feed_once<E: From<DataError>>(
        &self,
        number: usize,
        rank: usize,
        put: impl FnMut(BufferId, Element, &[u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let Deal { ranks, batch, examples, .. } = self.deal;
        let first = (number * ranks + rank % ranks) * batch;
        match first + batch <= examples {
            true => self.put_range(first..first + batch, put),
            false => self.put((first..first + batch).map(|i| i % examples.max(1)), put),
        }?;
        Ok(examples.saturating_sub(first).min(batch))
    }

    /// Passes consecutive examples to `put`: where they lie, if one file has all of them.
    fn put_range<E: From<DataError>>(
        &self,
        examples: Range<usize>,
        mut put: impl FnMut(BufferId, Element, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let number = self.files.partition_point(|f| f.first <= examples.start) - 1;
        if self.files.get(number + 1).is_some_and(|next| next.first < examples.end) {
            return self.put(examples, put);
        }
        let file = &self.files[number];
        let (at, n) = (examples.start - file.first, examples.len());
        for column in &self.columns {
            let Column { input, element, parts, .. } = column;
            let Some(size) = column.example else {
                put(input.buffer, *element, &parts[0])?;
                continue;
            };
            let bytes = &parts[number][at * size..][..n * size];
            if self.check_late && column.is_checked() {
                check::ranges(&file.path, input, *element, bytes, at)?;
            }
            put(input.buffer, *element, bytes)?;
        }
        Ok(())
    }

    /// Passes the examples of these numbers to `put`.
    fn put<E: From<DataError>>(
        &self,
        examples: impl Iterator<Item = usize> + Clone,
        mut put: impl FnMut(BufferId, Element, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut picked = Vec::new();
        for column in &self.columns {
            let Some(size) = column.example else {
                put(column.input.buffer, column.element, &column.parts[0])?;
                continue;
            };
            picked.clear();
            for i in examples.clone() {
                let number = self.files.partition_point(|f| f.first <= i) - 1;
                let file = &self.files[number];
                let bytes = &column.parts[number][(i - file.first) * size..][..size];
                if self.check_late && column.is_checked() {
                    let at = i - file.first;
                    check::ranges(&file.path, &column.input, column.element, bytes, at)?;
                }
                picked.extend_from_slice(bytes);
            }
            put(column.input.buffer, column.element, &picked)?;
        }
        Ok(())
    }

    /// The order of an epoch's examples.
    fn order(&self, seed: u64, epoch: usize) -> Arc<[usize]> {
        let mut last = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if last.0 != epoch {
            *last = (epoch, shuffled(self.len(), seed, epoch).into());
        }
        Arc::clone(&last.1)
    }
}

/// Adds the contents of a file to every input's column; returns the number of its examples, if any tensor is per example.
fn add(
    path: &Path,
    contents: &Contents,
    (plan, forms): (&Plan, &[Form]),
    columns: &mut Vec<Column>,
) -> Result<Option<usize>, DataError> {
    let mut examples: Option<(usize, &str)> = None;
    for (i, (input, form)) in plan.inputs.iter().zip(forms).enumerate() {
        let part = Part::of(path, contents, input, *form)?;
        if let Some(n) = part.examples {
            if let Some((others, name)) = examples.filter(|(m, _)| *m != n) {
                let reason =
                    format!("`{}` has {n} examples, and `{name}` has {others}", input.name);
                return Err(DataError::content(path, reason));
            }
            examples = Some((n, &input.name));
        }
        match columns.get_mut(i) {
            Some(column) => column.add(path, part)?,
            None => columns.push(Column::of(form.spec(input), part)),
        }
    }
    Ok(examples.map(|(n, _)| n))
}

/// The elements of an input's buffer.
pub struct Fed {
    /// The buffer.
    pub buffer: BufferId,
    /// The type of the elements.
    pub element: Element,
    /// The elements.
    pub bytes: Bytes,
}

/// Examples of one rank's batch: the size of the first axis of inputs that have different examples.
fn batch(columns: &[Column], plan: &Plan) -> Result<usize, String> {
    let varying = columns.iter().find(|c| c.example.is_some());
    match varying.map(|column| &column.input) {
        None => Ok(plan.batch().unwrap_or(1)),
        Some(input) => match input.ty.shape.dims().first() {
            Some(n) if *n > 0 => Ok(*n),
            _ => Err(format!("`{}` is {}: a batch without examples", input.name, input.ty)),
        },
    }
}

/// Reads tensors exactly as the plan's inputs are declared, for one batch shared by all ranks. Inputs in `optional` may
/// be missing; false if any is.
///
/// # Errors
/// If the file cannot be read, lacks a tensor, has one of another dtype or shape, or an index out of range.
pub fn read_inputs(
    path: &Path,
    plan: &Plan,
    optional: &[String],
) -> Result<(Vec<Fed>, bool), DataError> {
    let contents = formats::read(path, plan, None)?;
    let (mut fed, mut complete) = (Vec::new(), true);
    for input in &plan.inputs {
        if optional.contains(&input.name) && !contents.has(&input.name) {
            complete = false;
            continue;
        }
        let Part { element, bytes, .. } = Part::of(path, &contents, input, Form::Shared)?;
        check::ranges(path, input, element, &bytes, 0)?;
        fed.push(Fed { buffer: input.buffer, element, bytes });
    }
    Ok((fed, complete))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_ir::plan::InputSpec;
    use frit_ir::{DType, TensorType};

    fn data(n: usize, ranks: usize, seed: Option<u64>) -> Data {
        over(&[n], ranks, seed)
    }

    /// Data with files of these numbers of examples.
    fn over(sizes: &[usize], ranks: usize, seed: Option<u64>) -> Data {
        let input = InputSpec {
            name: "x".into(),
            ty: TensorType::new(DType::U8, [2]),
            buffer: BufferId(0),
            per_example: true,
            ranges: vec![],
        };
        let (mut parts, mut files, mut first) = (Vec::new(), Vec::new(), 0);
        for n in sizes {
            parts.push(Bytes::from((first as u8..(first + n) as u8).collect::<Vec<_>>()));
            files.push(File { path: "data".into(), first });
            first += n;
        }
        let columns = vec![Column { input, element: Element::U8, example: Some(1), parts }];
        let order = Mutex::new((usize::MAX, Arc::from([])));
        let deal = Deal { examples: first, ranks, accumulation: 1, batch: 2, keep_rest: false };
        Data { columns, files, deal, has_whole_examples: false, check_late: false, seed, order }
    }

    /// The examples of an epoch, step by step and rank by rank.
    fn epoch(data: &Data, number: usize) -> Vec<u8> {
        let steps = data.len() / data.deal.global_batch();
        let mut seen = Vec::new();
        for step in number * steps..(number + 1) * steps {
            for rank in 0..data.deal.ranks {
                let put = |_, _, bytes: &[u8]| {
                    seen.extend_from_slice(bytes);
                    Ok::<_, DataError>(())
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
        // The last examples of an epoch, which the larger batch drops: the next one begins.
        assert_eq!(data(10, 2, None).step_at(data(10, 1, None).position(4)), 2);
    }

    #[test]
    fn positions_that_count_on_over_epochs_name_the_same_step() {
        let fed = |example| Position { epoch: 0, example };
        // Two steps of 4 in an epoch of 11 examples.
        for step in [0, 1, 2, 3, 9] {
            assert_eq!(data(11, 2, None).step_at(fed(4 * step)), step);
        }
        assert_eq!(data(11, 2, None).step_at(Position { epoch: 3, example: 12 }), 9);
        // The rest makes a smaller step: 12 and 8 examples of 21.
        let mut data = data(21, 2, None);
        (data.deal.accumulation, data.deal.keep_rest) = (3, true);
        for (example, step) in [(0, 0), (12, 1), (20, 2), (32, 3), (40, 4)] {
            assert_eq!(data.step_at(fed(example)), step);
        }
    }

    #[test]
    fn the_rest_of_an_epoch_makes_a_smaller_step() {
        // Steps of 3 micro-steps of 2 ranks × 2 examples; 21 examples are one step, 2 micro-steps, and
        // one example that fills no micro-step.
        let mut data = data(21, 2, None);
        (data.deal.accumulation, data.deal.keep_rest) = (3, true);
        assert_eq!((0..4).map(|s| data.micro_steps(s)).collect::<Vec<_>>(), [3, 2, 3, 2]);
        let mut seen = Vec::new();
        for rank in 0..2 {
            for micro in 0..2 {
                let put = |_, _, bytes: &[u8]| {
                    seen.extend_from_slice(bytes);
                    Ok::<_, DataError>(())
                };
                data.feed(3, micro, rank, put).unwrap();
            }
        }
        assert_eq!(seen, [12, 13, 14, 15, 16, 17, 18, 19]);
        data.deal.keep_rest = false;
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
        // The order depends neither on the ranks nor on earlier requests.
        let two = data(12, 2, Some(7));
        assert_eq!(epoch(&two, 2), orders[2]);
        assert_eq!(epoch(&two, 0), orders[0]);
        assert_ne!(epoch(&data(12, 1, Some(8)), 0), orders[0]);
    }

    #[test]
    fn several_files_are_one_after_the_other() {
        for seed in [None, Some(3)] {
            for ranks in [1, 2] {
                let (one, three) = (data(13, ranks, seed), over(&[4, 0, 9], ranks, seed));
                assert_eq!((epoch(&three, 0), epoch(&three, 1)), (epoch(&one, 0), epoch(&one, 1)));
                let all = |data: &Data| {
                    let mut seen = Vec::new();
                    for (number, rank) in (0..data.batches()).flat_map(|b| [(b, 0), (b, ranks - 1)])
                    {
                        let put = |_, _, bytes: &[u8]| {
                            seen.extend_from_slice(bytes);
                            Ok::<_, DataError>(())
                        };
                        let counting = data.feed_once(number, rank, put).unwrap();
                        seen.push(counting as u8);
                    }
                    seen
                };
                assert_eq!(all(&three), all(&one));
            }
        }
    }
}
