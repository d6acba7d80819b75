//! The listening socket of a process. A peer must prove that it knows the job's secret before anything else is read,
//! and then send one short greeting. Every connection has its own thread, so slow or foreign ones delay no other; they
//! are dropped.

use super::secret::{PROOF, Secret, SecretSource, Side, challenge};
use std::cell::Cell;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Maximum bytes of a greeting.
const LONGEST_GREETING: usize = 1 << 16;
/// Time limit for a connection to authenticate and greet.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum connections that may be authenticating at the same time; others are dropped, and retry.
const MOST_PENDING: usize = 1024;
/// Stack of a thread that authenticates a connection.
const STACK: usize = 128 << 10;
/// The answer to a wrong proof.
const REFUSED: [u8; PROOF] = [0; PROOF];

/// A listening socket.
pub(super) struct Door {
    listener: TcpListener,
    address: SocketAddr,
}

/// An authenticated connection and its greeting.
pub(super) type Guest = (TcpStream, Vec<u8>);

impl Door {
    /// Listens at one address of this machine.
    ///
    /// # Errors
    /// If the address is not this machine's, or the port is taken.
    pub(super) fn open(host: &str, port: u16) -> io::Result<Door> {
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for address in (host, port).to_socket_addrs()? {
            match Door::at(address) {
                Ok(door) => return Ok(door),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Listens at an address of this machine, at a port that is free.
    ///
    /// # Errors
    /// If no port is free.
    pub(super) fn open_anywhere(ip: IpAddr) -> io::Result<Door> {
        Door::at(SocketAddr::new(ip, 0))
    }

    fn at(address: SocketAddr) -> io::Result<Door> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Door { listener, address })
    }

    /// The address at which it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes every guest to `welcome` until it returns that all have connected; returns the number of refused
    /// connections, and whether all connected before `end`, which `welcome` may change.
    ///
    /// # Errors
    /// The first error of `welcome`.
    pub(super) fn admit<E>(
        &self,
        secret: &Secret,
        end: &Cell<Instant>,
        mut welcome: impl FnMut(Guest) -> Result<bool, E>,
    ) -> Result<(usize, bool), E> {
        let (tell, hear) = mpsc::channel();
        let pending = Arc::new(AtomicUsize::new(0));
        let mut turned_away = 0;
        loop {
            let mut pause = Duration::from_millis(10);
            if let Ok((stream, _)) = self.listener.accept() {
                let told = (tell.clone(), pending.clone(), secret.clone());
                turned_away += usize::from(!hear_out(stream, told));
                pause = Duration::ZERO;
            }
            match hear.recv_timeout(pause) {
                Ok(Some(guest)) => {
                    if welcome(guest)? {
                        return Ok((turned_away, true));
                    }
                }
                Ok(None) => turned_away += 1,
                Err(_) => {}
            }
            if Instant::now() >= end.get() {
                return Ok((turned_away, false));
            }
        }
    }
}

type Told = (mpsc::Sender<Option<Guest>>, Arc<AtomicUsize>, Secret);

/// Authenticates a connection on a separate thread; false if there are too many.
fn hear_out(stream: TcpStream, (tell, pending, secret): Told) -> bool {
    if pending.fetch_add(1, Ordering::Relaxed) >= MOST_PENDING {
        pending.fetch_sub(1, Ordering::Relaxed);
        return false;
    }
    let begun = Arc::clone(&pending);
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || {
        let guest = greeted(&stream, &secret).ok().map(|greeting| (stream, greeting));
        begun.fetch_sub(1, Ordering::Relaxed);
        // Nothing receives it once all have connected.
        let _ = tell.send(guest);
    });
    thread.is_ok() || {
        pending.fetch_sub(1, Ordering::Relaxed);
        false
    }
}

/// The greeting of a connection that knows the secret.
fn greeted(stream: &TcpStream, secret: &Secret) -> io::Result<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let own = challenge()?;
    (&*stream).write_all(&own)?;
    let mut answer = [0; 2 * PROOF];
    read_until(stream, &mut answer, end)?;
    let (theirs, proof) = answer.split_at(PROOF);
    let challenges = [own, theirs.try_into().map_err(io::Error::other)?];
    if !secret.accepts(Side::Connects, &challenges, proof) {
        (&*stream).write_all(&REFUSED)?;
        return Err(ErrorKind::PermissionDenied.into());
    }
    (&*stream).write_all(&secret.prove(Side::Listens, &challenges))?;
    let mut length = [0; 4];
    read_until(stream, &mut length, end)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST_GREETING {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut greeting = vec![0; length];
    read_until(stream, &mut greeting, end)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(greeting)
}

/// Fills `buffer` before `end`, however slowly data arrives.
fn read_until(mut stream: &TcpStream, buffer: &mut [u8], end: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < buffer.len() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[at..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Connects to a door, which may not be open yet, authenticates with the shared secret, and greets.
///
/// # Errors
/// Why it did not succeed before `end`.
pub(super) fn enter(
    (host, port): (&str, u16),
    source: &SecretSource,
    greeting: &[u8],
    end: Instant,
) -> Result<(TcpStream, Secret), String> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let error = match try_to_enter((host, port), source, greeting, left) {
            Ok(entered) => return Ok(entered),
            Err(Refused::Secret) if !source.may_change() => {
                return Err(Refused::Secret.to_string());
            }
            Err(e) => e,
        };
        if left.is_zero() {
            return Err(error.to_string());
        }
        std::thread::sleep(Duration::from_millis(50).min(left));
    }
}

/// Why a door refused a connection.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("its secret differs: is FRIT_SECRET the same on every rank?")]
    Secret,
    #[error("{0}")]
    NoSecret(String),
    #[error("{0}")]
    Io(#[from] io::Error),
}

fn try_to_enter(
    (host, port): (&str, u16),
    source: &SecretSource,
    greeting: &[u8],
    left: Duration,
) -> Result<(TcpStream, Secret), Refused> {
    let secret = source.read().map_err(Refused::NoSecret)?;
    let mut stream = connect((host, port), left.max(Duration::from_millis(1)))?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let end = Instant::now() + PATIENCE;
    let mut theirs = [0; PROOF];
    read_until(&stream, &mut theirs, end)?;
    let challenges = [theirs, challenge()?];
    stream.write_all(&challenges[1])?;
    stream.write_all(&secret.prove(Side::Connects, &challenges))?;
    let mut proof = [0; PROOF];
    read_until(&stream, &mut proof, end)?;
    if !secret.accepts(Side::Listens, &challenges, &proof) {
        return Err(Refused::Secret);
    }
    let mut message = (greeting.len() as u32).to_le_bytes().to_vec();
    message.extend(greeting);
    stream.write_all(&message)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((stream, secret))
}

/// Connects to the first address of a host that answers.
fn connect(to: (&str, u16), timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
    for address in to.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
