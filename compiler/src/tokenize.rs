//! Turns text into shards of token ids, with a `tokenizer.json` of Hugging Face.
//!
//! A shard has the header of GPT-2 shards (uint16) or Llama shards (uint32), the latter if the vocabulary needs it; see docs/data.md. Each
//! document is followed by the separator. Documents are encoded in parallel and written in order, so that the same texts give the same
//! bytes on every machine.

use crate::diagnostics::Report;
use flate2::read::MultiGzDecoder;
use frit_ir::{Code, Diagnostic, counted};
use frit_runtime::files;
use frit_runtime::progress::Progress;
use serde_json::Value;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tokenizers::Tokenizer;

/// Bytes of text that are encoded at once.
const BATCH: usize = 8 << 20;
/// Separators of well-known tokenizers, of which the first that is in the vocabulary is used.
const SEPARATORS: [&str; 7] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]"];
/// Magic and version of a header, and bytes of a token.
const HEADERS: [(u32, u32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];

/// The kinds of shards, with which their names begin.
const KINDS: [&str; 2] = ["train", "validation"];

/// What is turned into tokens.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `tokenizer.json`, or a folder that has it.
    pub tokenizer: PathBuf,
    /// Files of JSON lines, of which each is a document, and text files; each may be compressed with gzip. JSON lines are known by the name
    /// `.jsonl`, or by first lines that are objects with the field.
    pub texts: Vec<PathBuf>,
    /// The field of a line that has the text.
    pub field: String,
    /// Each line of a text file is a document, instead of the whole file.
    pub lines: bool,
    /// The token after each document; by default that of the tokenizer.
    pub separator: Option<String>,
    /// Tokens of a shard.
    pub shard_tokens: usize,
    /// The fraction of documents that go to the validation shards.
    pub validation: f64,
    /// The folder of the shards.
    pub folder: PathBuf,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Documents.
    pub documents: usize,
    /// Tokens for training and for validation, with separators.
    pub tokens: [usize; 2],
    /// Shards for training and for validation.
    pub shards: [Vec<PathBuf>; 2],
    /// The token after each document.
    pub separator: String,
    /// Ids of the vocabulary, from 0.
    pub vocabulary: usize,
}

/// Tokenizes texts; writes all shards or none.
///
/// # Errors
/// If a file cannot be read or written, a line has no text, the separator is not in the vocabulary, or the folder has shards.
pub fn tokenize(options: &Options) -> Result<Written, Report> {
    let tokenizer = load(&options.tokenizer)?;
    let (separator, id) = separator(&tokenizer, options)?;
    let (folder, vocabulary) = (&options.folder, vocabulary(&tokenizer));
    if KINDS.iter().any(|kind| folder.join(shard_name(kind, 0)).exists()) {
        let what = format!("{} has shards already", folder.display());
        return Err(refuse(what).help("give another folder, or remove them").into());
    }
    let is_new = !folder.exists();
    let aside = folder.join(format!(".partial-{}", std::process::id()));
    std::fs::create_dir_all(&aside).map_err(|e| unwritable(&aside, &e))?;
    let written = encode_all(options, tokenizer, id, &aside).and_then(|(documents, shards)| {
        let moved = shards.each_ref().map(|shards| shards.move_to(folder));
        let [train, validation] = moved;
        let tokens = shards.map(|shards| shards.tokens);
        Ok((documents, tokens, [train?, validation?]))
    });
    // Nothing incomplete is left behind; what cannot be removed does no harm.
    let _ = std::fs::remove_dir_all(&aside);
    if is_new && written.is_err() {
        let _ = std::fs::remove_dir(folder);
    }
    let (documents, tokens, shards) = written?;
    Ok(Written { documents, tokens, shards, separator, vocabulary })
}

/// Writes shards into a folder; returns the number of documents too.
fn encode_all(
    options: &Options,
    tokenizer: Tokenizer,
    separator: u32,
    folder: &Path,
) -> Result<(usize, [Shards; 2]), Diagnostic> {
    let is_wide = vocabulary(&tokenizer) > usize::from(u16::MAX) + 1;
    let shards = KINDS.map(|kind| Shards {
        folder: folder.into(),
        kind,
        header: HEADERS[usize::from(is_wide)],
        limit: options.shard_tokens,
        pending: Vec::new(),
        tokens: 0,
        files: 0,
    });
    let total = options.texts.iter().map(|path| size(path)).sum::<Result<u64, _>>()?;
    let mut run = Run {
        tokenizer,
        separator,
        validation: options.validation,
        shards,
        batch: Vec::new(),
        bytes: 0,
        documents: 0,
        shown: 0,
        done: 0,
        progress: Progress::new("MiB", 0, (total >> 20) as usize),
    };
    for path in &options.texts {
        run.read(path, options)?;
    }
    run.encode()?;
    run.progress.finish();
    if run.documents == 0 {
        return Err(refuse("the texts have no document"));
    }
    if options.validation > 0.0 && run.shards.iter().any(|shards| shards.tokens == 0) {
        let all = counted(run.documents, "document");
        let what =
            format!("a fraction of {} leaves nothing to one part of {all}", options.validation);
        let help = "give another --validation; with --lines every line of a text is a document";
        return Err(refuse(what).help(help));
    }
    for shards in run.shards.iter_mut().filter(|shards| !shards.pending.is_empty()) {
        shards.write()?;
    }
    Ok((run.documents, run.shards))
}

fn refuse(what: impl Into<String>) -> Diagnostic {
    Diagnostic::error(Code::Tokenize, what)
}

fn unreadable(path: &Path, e: impl std::fmt::Display) -> Diagnostic {
    refuse(format!("cannot read {}: {e}", path.display()))
}

fn unwritable(path: &Path, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(Code::FileUnwritable, format!("cannot write {}: {e}", path.display()))
}

fn size(path: &Path) -> Result<u64, Diagnostic> {
    std::fs::metadata(path).map(|m| m.len()).map_err(|e| unreadable(path, e))
}

/// A tokenizer that neither cuts nor pads.
fn load(path: &Path) -> Result<Tokenizer, Diagnostic> {
    let help = "give the tokenizer.json that `tokenizer.save_pretrained` of Transformers writes";
    let path = &if path.is_dir() { path.join("tokenizer.json") } else { path.into() };
    let mut tokenizer = Tokenizer::from_file(path).map_err(|e| unreadable(path, e).help(help))?;
    tokenizer.with_truncation(None).map_err(|e| unreadable(path, e))?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// One more than the largest id.
fn vocabulary(tokenizer: &Tokenizer) -> usize {
    tokenizer.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1)
}

/// The token after each document, and its id.
fn separator(tokenizer: &Tokenizer, options: &Options) -> Result<(String, u32), Diagnostic> {
    let known = |token: &str| Some((token.to_string(), tokenizer.token_to_id(token)?));
    match &options.separator {
        Some(token) => known(token).ok_or_else(|| {
            refuse(format!("the token `{token}` is not in the vocabulary"))
                .help("give --separator a token of the tokenizer")
        }),
        None => SEPARATORS.iter().find_map(|token| known(token)).ok_or_else(|| {
            refuse("it is not known which token ends a document").help("name it: --separator TOKEN")
        }),
    }
}

/// A text in work.
struct Run {
    tokenizer: Tokenizer,
    separator: u32,
    validation: f64,
    shards: [Shards; 2],
    /// Documents that are encoded next, and their size.
    batch: Vec<String>,
    bytes: usize,
    documents: usize,
    /// Progress in MiB, and bytes that were read.
    shown: usize,
    done: usize,
    progress: Progress,
}

impl Run {
    fn read(&mut self, path: &Path, options: &Options) -> Result<(), Diagnostic> {
        let Text { mut lines, is_json, read } = Text::open(path, &options.field)?;
        let before = self.done;
        if !is_json && !options.lines {
            let mut bytes = Vec::new();
            lines.read_to_end(&mut bytes).map_err(|e| unreadable(path, e))?;
            self.done = before + read.get();
            let text = String::from_utf8(bytes).map_err(|e| {
                let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
                not_text(path, 1 + valid.iter().filter(|b| **b == b'\n').count())
            })?;
            return self.add(text);
        }
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if lines.read_until(b'\n', &mut line).map_err(|e| unreadable(path, e))? == 0 {
                break;
            }
            self.done = before + read.get();
            let text = str::from_utf8(&line).map_err(|_| not_text(path, number))?;
            let text = text.trim_end_matches(['\r', '\n']);
            let text = match is_json && !text.trim().is_empty() {
                true => field(text, &options.field).map_err(|e| {
                    let json = refuse(format!("{}, line {number}: {e}", path.display()));
                    match number == 1 && text.trim_start().starts_with('[') {
                        true => {
                            json.help("write one object per line: jq -c '.[]' FILE > FILE.jsonl")
                        }
                        false => json,
                    }
                })?,
                false => text.to_string(),
            };
            self.add(text)?;
        }
        Ok(())
    }

    /// Adds a document; one without text is none.
    fn add(&mut self, text: String) -> Result<(), Diagnostic> {
        if text.trim().is_empty() {
            return Ok(());
        }
        self.bytes += text.len();
        self.batch.push(text);
        if self.bytes < BATCH { Ok(()) } else { self.encode() }
    }

    /// Encodes the documents read so far.
    fn encode(&mut self) -> Result<(), Diagnostic> {
        let batch = std::mem::take(&mut self.batch);
        self.bytes = 0;
        let encoded = self.tokenizer.encode_batch_fast(batch, false);
        for document in encoded.map_err(|e| refuse(format!("the tokenizer failed: {e}")))? {
            // Evenly spread, and the same however often a text is tokenized.
            let before = (self.documents as f64 * self.validation).floor();
            self.documents += 1;
            let is_validation = (self.documents as f64 * self.validation).floor() > before;
            let shards = &mut self.shards[usize::from(is_validation)];
            shards.add(document.get_ids())?;
            shards.add(&[self.separator])?;
        }
        while self.shown < self.done >> 20 {
            self.shown += 1;
            self.progress.advance(&counted(self.documents, "document"), &[]);
        }
        Ok(())
    }
}

/// The text of a line of JSON.
fn field(line: &str, field: &str) -> Result<String, String> {
    let value: Value = serde_json::from_str(line).map_err(|e| {
        let what = e.to_string();
        let what = what.split(" at line").next().unwrap_or_default();
        format!("it is no JSON: {what} at column {}", e.column())
    })?;
    if !value.is_object() {
        return Err(format!("it is no JSON object with the field `{field}`"));
    }
    match value.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("the field `{field}` is not text")),
        None => {
            let names = value.as_object().into_iter().flat_map(|o| o.keys());
            let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
            Err(format!("it has no field `{field}`, but {}", names.join(", ")))
        }
    }
}

fn not_text(path: &Path, line: usize) -> Diagnostic {
    refuse(format!("{}, line {line}: it is not text in UTF-8", path.display()))
        .help("convert it, e.g. iconv -f LATIN1 -t UTF-8 FILE > NEW")
}

/// A file of text.
struct Text {
    /// Its content, decompressed, without the mark of its byte order.
    lines: Box<dyn BufRead>,
    /// Whether each line is a JSON object.
    is_json: bool,
    /// Bytes of the file that were read.
    read: Rc<Cell<usize>>,
}

/// Lines by which JSON is known.
const SEEN: usize = 16;

/// What begins a file compressed with gzip, one with zstd, and one with a byte order mark.
const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

impl Text {
    fn open(path: &Path, field: &str) -> Result<Text, Diagnostic> {
        let read = Rc::new(Cell::new(0));
        let file = File::open(path).map_err(|e| unreadable(path, e))?;
        let file = Counted { file, read: Rc::clone(&read) };
        let mut lines: Box<dyn BufRead> = Box::new(BufReader::with_capacity(1 << 20, file));
        let begins = |lines: &mut Box<dyn BufRead>, with: &[u8]| {
            lines.fill_buf().map(|b| b.starts_with(with)).map_err(|e| unreadable(path, e))
        };
        if begins(&mut lines, &ZSTD)? {
            let help = "decompress it, or compress it with gzip";
            return Err(refuse(format!("{} is compressed with zstd", path.display())).help(help));
        }
        let mut name = path.to_path_buf();
        if name.extension().is_some_and(|e| e.eq_ignore_ascii_case("gz")) {
            name.set_extension("");
        }
        if begins(&mut lines, &GZIP)? {
            lines = Box::new(BufReader::with_capacity(1 << 20, MultiGzDecoder::new(lines)));
        }
        if begins(&mut lines, &BYTE_ORDER_MARK)? {
            lines.consume(BYTE_ORDER_MARK.len());
        }
        let extension = name.extension().map(|e| e.to_string_lossy().to_lowercase());
        let is_named = matches!(extension.as_deref(), Some("jsonl" | "ndjson" | "json"));
        // Files of other names may hold the same.
        let begin = lines.fill_buf().map_err(|e| unreadable(path, e))?;
        let whole =
            begin.iter().rposition(|b| *b == b'\n').map_or(&begin[..0], |end| &begin[..end]);
        let mut seen = whole.split(|b| *b == b'\n').take(SEEN);
        let is_line =
            |line: &[u8]| str::from_utf8(line).is_ok_and(|line| self::field(line, field).is_ok());
        let is_json = is_named || !whole.is_empty() && seen.all(is_line);
        Ok(Text { lines, is_json, read })
    }
}

/// Counts the bytes that are read from a file.
struct Counted {
    file: File,
    read: Rc<Cell<usize>>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(into)?;
        self.read.set(self.read.get() + n);
        Ok(n)
    }
}

fn shard_name(kind: &str, number: usize) -> String {
    format!("{kind}-{number:05}.bin")
}

/// Shards of one kind.
struct Shards {
    folder: PathBuf,
    kind: &'static str,
    header: (u32, u32, usize),
    /// Tokens of a full shard.
    limit: usize,
    pending: Vec<u32>,
    tokens: usize,
    /// Shards that were written.
    files: usize,
}

impl Shards {
    fn add(&mut self, mut ids: &[u32]) -> Result<(), Diagnostic> {
        self.tokens += ids.len();
        while self.pending.len() + ids.len() > self.limit {
            let (now, later) = ids.split_at(self.limit - self.pending.len());
            self.pending.extend_from_slice(now);
            ids = later;
            self.write()?;
        }
        self.pending.extend_from_slice(ids);
        Ok(())
    }

    fn write(&mut self) -> Result<(), Diagnostic> {
        let path = self.folder.join(shard_name(self.kind, self.files));
        let ids = std::mem::take(&mut self.pending);
        let (magic, version, size) = self.header;
        let mut head = vec![0_u32; 256];
        (head[0], head[1], head[2]) = (magic, version, ids.len() as u32);
        files::deliver(&path, |out| {
            out.write_all(&head.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())?;
            for part in ids.chunks(1 << 16) {
                let bytes = part.iter().flat_map(|id| id.to_le_bytes().into_iter().take(size));
                out.write_all(&bytes.collect::<Vec<u8>>())?;
            }
            Ok(())
        })
        .map_err(|e| unwritable(&path, &e))?;
        self.files += 1;
        Ok(())
    }

    /// Moves what was written into another folder; returns the files.
    fn move_to(&self, folder: &Path) -> Result<Vec<PathBuf>, Diagnostic> {
        let names = (0..self.files).map(|number| shard_name(self.kind, number));
        let moved = names.map(|name| {
            let path = folder.join(&name);
            files::rename(&self.folder.join(name), &path).map_err(|e| unwritable(&path, &e))?;
            Ok(path)
        });
        moved.collect()
    }
}
