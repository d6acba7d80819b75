//! A protobuf message to be written: small parts as bytes, elements of large tensors as references to their source.

use crate::wire;
use prost::bytes::Bytes;

/// The elements of one tensor, read when they are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    /// The parameter whose values they are.
    pub(super) parameter: String,
    /// Whether the tensor is the parameter's transpose.
    pub(super) transposed: bool,
    /// ONNX's number of their type.
    pub(super) dtype: u64,
    /// Their size in bytes.
    pub(super) bytes: u64,
    /// The adapter that is added to them.
    pub(super) adapter: Option<Merge>,
}

/// An adapter that is merged into a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Merge {
    /// The weight, with ONNX's number of its type, where it is not among the trained parameters.
    pub(super) base: Option<(Bytes, u64)>,
    /// Shape of the weight.
    pub(super) shape: [usize; 2],
    /// Whether the weight is `[out, in]`.
    pub(super) out_first: bool,
    /// Bits of the factor.
    pub(super) scale: u64,
}

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Bytes(Bytes),
    Elements(Elements),
}

impl Piece {
    pub(super) fn len(&self) -> u64 {
        match self {
            Piece::Bytes(bytes) => bytes.len() as u64,
            Piece::Elements(elements) => elements.bytes,
        }
    }
}

/// A message of Protocol Buffers.
#[derive(Clone, Debug, Default)]
pub(super) struct Message {
    pieces: Vec<Piece>,
    len: u64,
}

impl Message {
    /// Its parts, in order.
    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Its size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn push(&mut self, piece: Piece) {
        self.len += piece.len();
        self.pieces.push(piece);
    }

    /// Appends fields as they stand.
    pub(super) fn put_fields(&mut self, bytes: Bytes) {
        self.push(Piece::Bytes(bytes));
    }

    /// Appends an integer field.
    pub(super) fn put_integer(&mut self, number: u64, value: u64) {
        let mut field = Vec::new();
        wire::put_integer(&mut field, number, value);
        self.put_fields(field.into());
    }

    /// Appends a field of bytes.
    pub(super) fn put(&mut self, number: u64, content: &[u8]) {
        let mut field = Vec::new();
        wire::put(&mut field, number, content);
        self.put_fields(field.into());
    }

    /// Appends a field of bytes that are not copied or not known yet.
    pub(super) fn put_piece(&mut self, number: u64, piece: Piece) {
        self.put_fields(wire::head(number, piece.len()).into());
        self.push(piece);
    }

    /// Appends a field that is a message.
    pub(super) fn put_message(&mut self, number: u64, message: Message) {
        self.put_fields(wire::head(number, message.len).into());
        self.len += message.len;
        self.pieces.extend(message.pieces);
    }
}
