"""The embedded platform behind `stillhouse up`: its servers, services and supervision."""
