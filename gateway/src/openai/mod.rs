//! OpenAI's words: requests read and checked, replies and stream events written. Pure.

pub mod fields;
pub mod json;
pub mod messages;
pub mod request;
pub mod response;
pub mod validate;
