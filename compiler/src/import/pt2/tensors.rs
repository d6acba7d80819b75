//! The tensors of an archive as ONNX initializers: slices of the file, as external data; those that are not stored row by row
//! are copied.

use super::archive::{Archive, unreadable};
use super::dtype;
use super::schema::{Payload, Payloads, Size, TensorMeta};
use crate::import::dims::checked_numel;
use crate::import::onnx::messages::{StringStringEntryProto, TensorProto};
use frit_ir::Diagnostic;
use prost::bytes::Bytes;
use std::collections::HashMap;
use std::ops::Range;

/// Where a tensor lies; parameters of one place are one parameter.
pub(super) type Place = (Range<usize>, Vec<usize>, Vec<usize>);

/// The tensors of an archive.
pub(super) struct Tensors<'a> {
    archive: &'a Archive,
    /// The file's own name.
    file: &'a str,
    /// By kind: weights, constants.
    payloads: [(&'static str, Payloads); 2],
    /// Bytes that may be copied.
    room: u64,
}

/// One tensor.
pub(super) struct Stored {
    pub(super) proto: TensorProto,
    pub(super) place: Place,
    pub(super) requires_grad: bool,
}

impl<'a> Tensors<'a> {
    pub(super) fn new(archive: &'a Archive, file: &'a str, room: u64) -> Result<Self, Diagnostic> {
        let weights = archive.payloads("weights")?;
        let constants = archive.payloads("constants")?;
        let payloads = [("weights", weights), ("constants", constants)];
        Ok(Tensors { archive, file, payloads, room })
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If the archive has none, or what it says of it is not so.
    pub(super) fn read(&mut self, name: &str) -> Result<Stored, Diagnostic> {
        let refuse = |what: String| unreadable(format!("the tensor `{name}` {what}"));
        let found = self.payloads.iter().find_map(|(kind, p)| Some((*kind, p.config.get(name)?)));
        let Some((kind, payload)) = found else { return Err(refuse("has no data".into())) };
        let Payload { path_name, use_pickle, tensor_meta } = payload;
        let Some(meta) = tensor_meta.as_ref().filter(|_| !use_pickle) else {
            return Err(refuse("is stored as a Python object".into()));
        };
        let record = self.archive.record(&format!("data/{kind}/{path_name}"))?;
        let layout = Layout::of(meta).ok_or_else(|| refuse("has no valid shape".into()))?;
        let Some(span) = layout.span().filter(|span| *span <= record.len()) else {
            return Err(refuse(format!(
                "needs more bytes than the {} of its record `{path_name}`",
                record.len()
            )));
        };
        let mut proto = TensorProto {
            name: name.into(),
            dims: layout.sizes.iter().map(|n| *n as i64).collect(),
            data_type: layout.dtype,
            ..TensorProto::default()
        };
        let bytes = layout.numel() * layout.element;
        let start = record.start + layout.offset * layout.element;
        if layout.is_row_major() {
            let entry =
                |key: &str, value: String| StringStringEntryProto { key: key.into(), value };
            proto.data_location = 1;
            proto.external_data = vec![
                entry("location", self.file.into()),
                entry("offset", start.to_string()),
                entry("length", bytes.to_string()),
            ];
        } else {
            // Elements that are stored once may be repeated any number of times.
            self.room = self.room.checked_sub(bytes as u64).ok_or_else(|| {
                refuse(format!("is not stored row by row, and its {bytes} bytes are too many to copy"))
                    .help("make it contiguous before exporting, or raise the limit: --set import.max_bytes=N")
            })?;
            proto.raw_data = Some(layout.gathered(&self.archive.bytes(record.clone())));
        }
        let place = (start..record.start + span, layout.sizes, layout.strides);
        Ok(Stored { proto, place, requires_grad: meta.requires_grad })
    }
}

/// How a tensor lies in its record.
struct Layout {
    dtype: i32,
    element: usize,
    sizes: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
    offset: usize,
}

impl Layout {
    fn of(meta: &TensorMeta) -> Option<Layout> {
        let number = |size: &Size| usize::try_from(size.known()?).ok();
        let dtype = dtype::of_torch(meta.dtype)?;
        let sizes: Vec<usize> = meta.sizes.iter().map(number).collect::<Option<_>>()?;
        let strides: Vec<usize> = meta.strides.iter().map(number).collect::<Option<_>>()?;
        let offset = meta.storage_offset.as_ref().map_or(Some(0), number)?;
        let element = dtype::size(dtype);
        let fits =
            strides.len() == sizes.len() && checked_numel(&sizes)?.checked_mul(element).is_some();
        fits.then_some(Layout { dtype, element, sizes, strides, offset })
    }

    fn numel(&self) -> usize {
        // Of an empty tensor the other sizes may be of any product.
        if self.sizes.contains(&0) { 0 } else { self.sizes.iter().product() }
    }

    /// Bytes of the record up to the last element.
    fn span(&self) -> Option<usize> {
        let mut end = self.offset;
        if self.numel() > 0 {
            for (size, stride) in self.sizes.iter().zip(&self.strides) {
                end = end.checked_add((size - 1).checked_mul(*stride)?)?;
            }
            end = end.checked_add(1)?;
        }
        end.checked_mul(self.element)
    }

    fn is_row_major(&self) -> bool {
        let mut expected = 1usize;
        for (size, stride) in self.sizes.iter().zip(&self.strides).rev() {
            if *size != 1 && *stride != expected {
                return self.numel() == 0;
            }
            expected = expected.saturating_mul(*size);
        }
        true
    }

    /// The elements row by row.
    fn gathered(&self, record: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(self.numel() * self.element);
        let mut index = vec![0; self.sizes.len()];
        for _ in 0..self.numel() {
            let at: usize = index.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
            let start = (self.offset + at) * self.element;
            out.extend_from_slice(&record[start..start + self.element]);
            for (i, size) in index.iter_mut().zip(&self.sizes).rev() {
                *i += 1;
                if *i < *size {
                    break;
                }
                *i = 0;
            }
        }
        out.into()
    }
}

/// Names of tensors that share memory, though they are not the same tensor.
pub(super) fn overlapping<'n>(places: &HashMap<Place, &'n str>) -> Option<(&'n str, &'n str)> {
    let mut all: Vec<(&Place, &'n str)> = places.iter().map(|(p, n)| (p, *n)).collect();
    all.sort_unstable_by_key(|((range, _, _), name)| (range.start, range.end, *name));
    let shares = |a: &Place, b: &Place| a.0.start < b.0.end && b.0.start < a.0.end;
    all.windows(2).find(|w| shares(w[0].0, w[1].0)).map(|w| (w[0].1, w[1].1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: &[usize], strides: &[usize], offset: usize) -> Layout {
        Layout { dtype: 2, element: 1, sizes: sizes.into(), strides: strides.into(), offset }
    }

    #[test]
    fn strides_are_followed() {
        let record = [0, 1, 2, 3, 4, 5];
        for (layout, row_major, expected) in [
            (layout(&[2, 3], &[3, 1], 0), true, &[0, 1, 2, 3, 4, 5][..]),
            (layout(&[3, 2], &[1, 3], 0), false, &[0, 3, 1, 4, 2, 5]),
            (layout(&[1, 2], &[9, 1], 2), true, &[2, 3]),
            (layout(&[2, 2], &[0, 1], 4), false, &[4, 5, 4, 5]),
            (layout(&[], &[], 3), true, &[3]),
            (layout(&[0, 4], &[7, 7], 0), true, &[]),
        ] {
            assert_eq!(layout.is_row_major(), row_major);
            assert!(layout.span().expect("it is small") <= record.len());
            assert_eq!(&layout.gathered(&record)[..], expected);
        }
        assert_eq!(layout(&[2], &[usize::MAX], 1).span(), None);
        assert_eq!(layout(&[3], &[3], 0).span(), Some(7));
    }
}
