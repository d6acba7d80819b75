//! Data for any plan: the elements of every input follow from its name, their place and the range that the plan accepts.

use frit_ir::DType;
use frit_ir::plan::Plan;
use safetensors::{Dtype, tensor::TensorView};
use std::path::{Path, PathBuf};

/// A tensor to be written: its name, type, shape and bytes.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Writes `examples` examples, changed as the words say:
///
/// - `equal`: all examples are the first one;
/// - `rows NAME N`: that tensor has N examples;
/// - `fill NAME VALUE`: all integers of that tensor are this;
/// - `ignored N`: the labels of the first N examples are all ignored;
/// - `all labels`: no label is ignored;
/// - `labels are the tokens + N`: those of integer inputs N places later.
pub(super) fn write(plan: &Plan, examples: usize, change: &[&str], dir: &Path) -> PathBuf {
    let mut tensors: Vec<Tensor> = Vec::new();
    for input in &plan.inputs {
        // What follows a word and the name of this input.
        let of = |word: &str| {
            let begins = format!("{word} {} ", input.name);
            change.iter().find_map(|c| c.strip_prefix(&begins)).map(str::to_string)
        };
        let rows = of("rows").map_or(examples, |n| n.parse().expect("a number of rows"));
        let shape: Vec<usize> =
            std::iter::once(rows).chain(input.ty.shape.dims()[1..].iter().copied()).collect();
        let width: usize = shape[1..].iter().product();
        let at = |i: usize| (if change.contains(&"equal") { 0 } else { i / width }, i % width);
        let ignored = change.iter().find_map(|c| c.strip_prefix("ignored "));
        let ignored: usize = ignored.map_or(0, |n| n.parse().expect("a number of examples"));
        let fill = of("fill").map(|n| n.parse::<i64>().expect("a number"));
        let labels = input.name == "labels";
        let count = rows * width;
        let (dtype, bytes) = match input.ty.dtype {
            DType::I64 => {
                let classes = input.ranges.iter().map(|r| r.hi + 1).min().unwrap_or(11);
                let token = |row: usize, column: usize| {
                    (row * 7 + column * 3 + row * column) as i64 % classes
                };
                let later = change.iter().find_map(|c| c.strip_prefix("labels are the tokens + "));
                let later = later.map(|n| n.parse::<usize>().expect("a number of places"));
                let value = |i: usize| {
                    let (row, column) = at(i);
                    match fill {
                        Some(fill) => fill,
                        None if labels && row < ignored => -100,
                        // Examples differ in how many labels count.
                        None if labels
                            && width > 1
                            && !change.contains(&"all labels")
                            && (row * 5 + column * 3) % 7 < row % 4 =>
                        {
                            -100
                        }
                        None => match later.filter(|_| labels) {
                            Some(n) => token(row, column + n),
                            None if labels => (row * 5 + column * 2 + 1) as i64 % classes,
                            None => token(row, column),
                        },
                    }
                };
                (Dtype::I64, (0..count).flat_map(|i| value(i).to_le_bytes()).collect())
            }
            DType::F32 => {
                let value = |i: usize| {
                    let (row, column) = at(i);
                    ((row * 37 + column * 11 + usize::from(labels) * 5) % 17) as f32 / 8.0 - 1.0
                };
                (Dtype::F32, (0..count).flat_map(|i| value(i).to_le_bytes()).collect())
            }
            other => panic!("no data of {other:?}"),
        };
        tensors.push(Tensor { name: input.name.clone(), dtype, shape, bytes });
    }
    let view = |t: &'_ Tensor| t.shape.clone();
    let views = tensors
        .iter()
        .map(|t| (t.name.clone(), TensorView::new(t.dtype, view(t), &t.bytes).expect("fits")));
    let path = dir.join("data.safetensors");
    safetensors::serialize_to_file(views, None, &path).expect("written");
    path
}
