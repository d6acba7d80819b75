//! `.parquet`: columns of numbers and of lists of equal lengths, unpacked into memory.
//!
//! A column of lists of `n` numbers is a tensor `[rows, n]`, one of lists of lists `[rows, m, n]`.

use super::super::bytes::Bytes;
use super::super::element::Element;
use super::{Array, Contents};
use crate::DataError;
use frit_ir::plan::Plan;
use parquet::basic::{ConvertedType, LogicalType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{DataType, FixedLenByteArray};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;
use std::fs::File;
use std::path::Path;

/// Rows that are unpacked at once.
const ROWS: usize = 1 << 16;

/// Reads the columns that the plan has inputs for.
///
/// # Errors
/// If it is no Parquet file, or a column has missing values or lists of different lengths.
pub(crate) fn read(path: &Path, plan: &Plan) -> Result<Contents, DataError> {
    let refuse = |reason: String| DataError::content(path, reason);
    let damaged = |e: ParquetError| match e.to_string() {
        text if text.contains("Disabled feature") || text.contains("not yet implemented") => {
            refuse(format!("{text}; compress it with snappy, gzip, zstd or lz4"))
        }
        text => refuse(format!("not a Parquet file: {text}")),
    };
    let file = File::open(path).map_err(DataError::io(path))?;
    let file = SerializedFileReader::new(file).map_err(damaged)?;
    let mut contents = Contents::default();
    for (number, column) in
        file.metadata().file_metadata().schema_descr().columns().iter().enumerate()
    {
        let name = column.path().parts().first().cloned().unwrap_or_default();
        let Some(element) = element(column) else {
            contents.others.insert(name, kind(column));
            continue;
        };
        if plan.inputs.iter().all(|input| input.name != name) {
            contents.others.insert(name, kind(column));
            continue;
        }
        let mut unpacked = Unpacked { element, ..Unpacked::new(column) };
        for group in 0..file.num_row_groups() {
            let reader = file.get_row_group(group).map_err(damaged)?;
            let reader = reader.get_column_reader(number).map_err(damaged)?;
            unpacked.add(reader).map_err(damaged)?;
        }
        let array =
            unpacked.array().map_err(|reason| refuse(format!("column `{name}`: {reason}")))?;
        if contents.arrays.insert(name.clone(), array).is_some() {
            return Err(refuse(format!("column `{name}` has several fields; use one column each")));
        }
    }
    Ok(contents)
}

/// The type of a column for messages.
fn kind(column: &ColumnDescriptor) -> String {
    match column.logical_type_ref() {
        Some(logical) => format!("{logical:?}").to_lowercase(),
        None => column.physical_type().to_string().to_lowercase(),
    }
}

/// The element type of a column of numbers.
fn element(column: &ColumnDescriptor) -> Option<Element> {
    let is_half = matches!(column.logical_type_ref(), Some(LogicalType::Float16));
    Some(match (column.physical_type(), column.converted_type()) {
        (Type::BOOLEAN, _) => Element::Bool,
        (Type::FLOAT, _) => Element::F32,
        (Type::DOUBLE, _) => Element::F64,
        (Type::FIXED_LEN_BYTE_ARRAY, _) if is_half => Element::F16,
        (Type::INT32, ConvertedType::NONE | ConvertedType::INT_32) => Element::I32,
        (Type::INT32, ConvertedType::INT_16) => Element::I16,
        (Type::INT32, ConvertedType::INT_8) => Element::I8,
        (Type::INT32, ConvertedType::UINT_32) => Element::U32,
        (Type::INT32, ConvertedType::UINT_16) => Element::U16,
        (Type::INT32, ConvertedType::UINT_8) => Element::U8,
        (Type::INT64, ConvertedType::NONE | ConvertedType::INT_64) => Element::I64,
        (Type::INT64, ConvertedType::UINT_64) => Element::U64,
        _ => return None,
    })
}

/// The values of a column, with what says where rows and lists begin.
struct Unpacked {
    element: Element,
    bytes: Vec<u8>,
    /// For each value, how deep the list is that it continues; 0 begins a row.
    repetitions: Vec<i16>,
    /// Rows so far.
    rows: usize,
    /// The definition level of a value that is there, and how many values are not.
    defined: i16,
    first_missing: Option<usize>,
    depth: i16,
}

impl Unpacked {
    fn new(column: &ColumnDescriptor) -> Unpacked {
        Unpacked {
            element: Element::F32,
            bytes: Vec::new(),
            repetitions: Vec::new(),
            rows: 0,
            defined: column.max_def_level(),
            first_missing: None,
            depth: column.max_rep_level(),
        }
    }

    fn add(&mut self, reader: ColumnReader) -> Result<(), ParquetError> {
        let element = self.element;
        match reader {
            ColumnReader::BoolColumnReader(r) => self.values(r, |x, out| out.push(u8::from(*x))),
            ColumnReader::Int32ColumnReader(r) => self.values(r, move |x, out| {
                // Narrow integers are stored as 32 bits, of which the low ones are theirs.
                out.extend_from_slice(&x.to_le_bytes()[..element.size()]);
            }),
            ColumnReader::Int64ColumnReader(r) => {
                self.values(r, |x, out| out.extend(x.to_le_bytes()))
            }
            ColumnReader::FloatColumnReader(r) => {
                self.values(r, |x, out| out.extend(x.to_le_bytes()))
            }
            ColumnReader::DoubleColumnReader(r) => {
                self.values(r, |x, out| out.extend(x.to_le_bytes()))
            }
            ColumnReader::FixedLenByteArrayColumnReader(r) => {
                self.values(r, |x: &FixedLenByteArray, out| out.extend_from_slice(x.data()))
            }
            ColumnReader::Int96ColumnReader(_) | ColumnReader::ByteArrayColumnReader(_) => {
                unreachable!("a column of numbers")
            }
        }
    }

    fn values<T: DataType>(
        &mut self,
        mut reader: ColumnReaderImpl<T>,
        put: impl Fn(&T::T, &mut Vec<u8>),
    ) -> Result<(), ParquetError> {
        let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let levels = (self.defined > 0).then_some(&mut definitions);
            let lists = (self.depth > 0).then_some(&mut repetitions);
            let (rows, ..) = reader.read_records(ROWS, levels, lists, &mut values)?;
            if rows == 0 {
                return Ok(());
            }
            values.iter().for_each(|x| put(x, &mut self.bytes));
            let missing = definitions.iter().position(|level| *level < self.defined);
            if let (None, Some(at)) = (self.first_missing, missing) {
                let begun = repetitions.iter().take(at + 1).filter(|r| **r == 0).count();
                let row = if self.depth > 0 { begun.saturating_sub(1) } else { at };
                self.first_missing = Some(self.rows + row);
            }
            self.rows += rows;
            self.repetitions.append(&mut repetitions);
            values.clear();
            definitions.clear();
        }
    }

    /// The column as a tensor.
    fn array(self) -> Result<Array, String> {
        if let Some(row) = self.first_missing {
            return Err(format!("row {row} has a missing value or an empty list"));
        }
        let mut shape = vec![self.rows];
        if self.depth > 0 {
            let end = self.repetitions.iter().skip(1).position(|r| *r == 0);
            let end = end.map_or(self.repetitions.len(), |at| at + 1);
            let first = &self.repetitions[..end];
            let begun = |depth: i16| first.iter().filter(|r| **r <= depth).count().max(1);
            shape.extend((0..self.depth).map(|depth| begun(depth + 1) / begun(depth)));
            // A value continues the innermost list that it does not begin.
            let continues = |mut at: usize| {
                let mut depth = self.depth;
                for size in shape[1..].iter().rev() {
                    if !at.is_multiple_of(*size) {
                        return depth;
                    }
                    (at, depth) = (at / size, depth - 1);
                }
                0
            };
            let size = shape[1..].iter().product::<usize>();
            let wrong =
                self.repetitions.iter().enumerate().position(|(i, r)| *r != continues(i % size));
            if let Some(at) = wrong {
                let begun = self.repetitions[..=at].iter().filter(|r| **r == 0).count();
                // A row that begins too early ends one that is too short.
                let row = begun.saturating_sub(1 + usize::from(self.repetitions[at] == 0));
                return Err(format!(
                    "row {} does not have the length {:?} of the first; pad or pack the rows to one length",
                    row,
                    &shape[1..]
                ));
            }
            if !self.repetitions.len().is_multiple_of(size) {
                return Err(format!(
                    "the last row is shorter than {:?}, the length of the first; pad or pack the rows to one length",
                    &shape[1..]
                ));
            }
        }
        Ok(Array::new(self.element, shape, Bytes::from(self.bytes)))
    }
}
